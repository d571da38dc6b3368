"""The models that the engine's and the trainer's own forwards can compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import SHAPE, build
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from stretto.models.decoder import fits
from stretto.models.decoder_support import activations, is_plain, linear_groups, same_adapters
from stretto.models.lora import LoraLinear, inject_lora


def llama(**options: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **options})).eval()


def test_known_architectures_are_plain_and_others_are_not() -> None:
    assert is_plain(build("qwen3"))
    assert is_plain(llama())
    assert is_plain(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)))
    assert not is_plain(build("qwen3-moe"))
    assert not is_plain(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64)))


def test_a_class_of_the_same_name_from_elsewhere_is_not() -> None:
    other = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    assert not is_plain(other(LlamaConfig(**SHAPE)))


def test_a_model_that_was_changed_is_not() -> None:
    model = build("qwen3")
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not is_plain(model)
    handle.remove()
    assert is_plain(model)
    model.model.layers[0].mlp.forward = lambda x: x
    assert not is_plain(model)


def test_a_layer_with_a_part_more_or_biases_in_part_is_not() -> None:
    model = llama()
    model.model.layers[1].extra = torch.nn.Linear(2, 2)
    assert not is_plain(model)
    model = llama()
    linear = model.model.layers[0].self_attn.k_proj
    linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
    assert not is_plain(model)


@pytest.mark.parametrize("change", [{"rope_type": "dynamic"}, {"rope_type": "unknown"}])
def test_angles_that_may_depend_on_more_than_the_position_are_not(change: dict[str, Any]) -> None:
    model = llama()
    model.model.rotary_emb.rope_type = change["rope_type"]
    assert not is_plain(model)


def test_a_rotary_embedding_of_a_part_of_each_head_is_not() -> None:
    model = llama()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]
    assert not is_plain(model)


def test_sharded_pretraining_products_are_not() -> None:
    model = llama()
    model.config.pretraining_tp = 2
    assert not is_plain(model)


def test_the_activations_are_named() -> None:
    assert activations(llama()) <= {"SiLU", "SiLUActivation"}
    assert fits(llama())
    relu = llama(hidden_act="relu")
    assert activations(relu) == {"ReLU"}
    assert is_plain(relu)
    assert not fits(relu), "the trainer's decoder has SiLU alone"


def test_adapters_may_differ_between_groups_and_not_between_layers() -> None:
    model = llama()
    inject_lora(model, 4, 8.0, ("q_proj", "down_proj"))
    assert same_adapters(model, LoraLinear)
    assert fits(model)
    model = llama()
    inject_lora(model, 4, 8.0, ("layers.0.self_attn.q_proj",))
    assert not same_adapters(model, LoraLinear)
    assert is_plain(model)
    assert not fits(model)


def test_linear_layers_over_one_input_are_one_group() -> None:
    layer = llama().model.layers[0]
    inputs = [{linear.in_features for linear in group} for group in linear_groups(layer)]
    assert [len(group) for group in linear_groups(layer)] == [3, 1, 2, 1]
    assert all(len(widths) == 1 for widths in inputs)
