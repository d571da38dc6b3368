"""The numbers that a memory plan needs of a model, against those of a model that is really made."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from stretto.models.expert_adapters import ExpertAdapter
from stretto.models.lora import inject_lora
from stretto.models.lora_options import LoraOptions
from stretto.models.tiny import tiny_config, tiny_moe_config
from stretto.setup.parameter_counts import count_parameters


def test_all_weights_are_trained_without_adapters() -> None:
    config = tiny_config()
    config.vocab_size = 1_000
    model, counts = AutoModelForCausalLM.from_config(config), count_parameters(config, None)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert counts.total == counts.trained == sum(sizes.values())
    assert counts.in_layers == sum(size for name, size in sizes.items() if ".layers." in name)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    assert counts.widest == max(each.out_features for each in linears.values())
    head = linears.pop("lm_head")
    assert counts.widest_inner == max(each.out_features for each in linears.values()) < head.out_features
    assert counts.in_matrices == sum(each.weight.numel() for each in linears.values())
    assert counts.is_lean
    assert counts.is_fused


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_adapters_alone_are_trained_and_those_on_experts_are_counted_apart(targets: tuple[str, ...]) -> None:
    lora = LoraOptions(rank=4, targets=targets)
    model, counts = AutoModelForCausalLM.from_config(tiny_moe_config()), count_parameters(tiny_moe_config(), lora)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    inject_lora(model, lora.rank, lora.effective_alpha, lora.targets)
    assert counts.trained == sum(each.numel() for each in model.parameters() if each.requires_grad)
    adapters = [each for each in model.modules() if isinstance(each, ExpertAdapter)]
    assert counts.on_experts == sum(each.numel() for adapter in adapters for each in adapter.parameters())
    assert (counts.on_experts > 0) == bool(targets)
    assert counts.lora == lora


def test_a_count_draws_no_values_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[str](), nn.init.kaiming_uniform_

    def seen(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        drawn.append(tensor.device.type)
        return draw(tensor, *args, **options)

    monkeypatch.setattr(nn.init, "kaiming_uniform_", seen)
    count_parameters(tiny_config(), LoraOptions(rank=4))
    assert set(drawn) == {"meta"}


def test_a_model_without_linear_layers_but_the_head_can_be_counted() -> None:
    counts = count_parameters(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=100), None)
    assert (counts.widest, counts.widest_inner, counts.in_matrices) == (100, 0, 0)
    assert not counts.is_lean
    assert not counts.is_fused
