"""Adapters on experts: where they go, and that PEFT, transformers and a merge compute the same with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from stretto.errors import ModelError
from stretto.models.adapter_config import read_adapter_config
from stretto.models.adapters import install_adapter, merge_adapter, read_adapter
from stretto.models.checksums import checksum
from stretto.models.loading import second_tree
from stretto.models.lora import inject_lora, lora_tensors, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.models.tiny import random_mixture

TOKENS = torch.arange(3, 20)[None]
targets = pytest.mark.parametrize(
    "targets", [("q_proj", "gate_up_proj", "down_proj"), ("gate_up_proj",), ("o_proj", "mlp.experts.down_proj")]
)


def adapted(model: Any, options: LoraOptions) -> tuple[str, ...]:
    """Puts adapters with random values on a model."""
    names = inject_lora(model, options.rank, options.effective_alpha, options.targets)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return names


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=40, num_key_value_heads=2, num_local_experts=4, **sizes)).eval()


@targets
def test_an_exported_adapter_is_loaded_by_peft_and_by_transformers(targets: tuple[str, ...], tmp_path: Path) -> None:
    base = random_mixture(0)
    ours, options = second_tree(base, share=True), LoraOptions(rank=3, targets=targets)
    names = adapted(ours, options)
    write_adapter(tmp_path, lora_tensors(ours, names), options=options, base="somewhere", names=names)
    logits = ours(TOKENS).logits
    assert not torch.allclose(logits, base(TOKENS).logits, atol=0.1)
    wrapped = peft.PeftModel.from_pretrained(second_tree(base, share=False), tmp_path)
    assert torch.allclose(wrapped(TOKENS).logits, logits, atol=1e-4)
    loaded: Any = second_tree(base, share=False)
    loaded.load_adapter(str(tmp_path))
    assert torch.allclose(loaded(TOKENS).logits, logits, atol=1e-4)


@targets
def test_an_exported_adapter_is_read_back_bit_for_bit_and_merges(targets: tuple[str, ...], tmp_path: Path) -> None:
    base = random_mixture(0)
    ours, options = second_tree(base, share=True), LoraOptions(rank=3, targets=targets)
    names = adapted(ours, options)
    tensors = lora_tensors(ours, names)
    write_adapter(tmp_path, tensors, options=options, base="somewhere", names=names)
    adapter = read_adapter(tmp_path)
    assert set(read_adapter_config(tmp_path).targets) == set(targets)
    assert adapter.tensors.keys() == tensors.keys()
    assert all(torch.equal(adapter.tensors[name], tensor) for name, tensor in tensors.items())
    logits = ours(TOKENS).logits
    again = second_tree(base, share=True)
    install_adapter(again, inject_lora(again, 3, 6.0, targets), adapter)
    assert torch.equal(again(TOKENS).logits, logits)
    merged = second_tree(base, share=False)
    merge_adapter(merged, adapter)
    assert torch.allclose(merged(TOKENS).logits, logits, atol=1e-4)


def test_gradients_of_the_adapters_are_those_of_peft(tmp_path: Path) -> None:
    base = mixtral()
    ours, theirs = second_tree(base, share=True), second_tree(base, share=False)
    options = LoraOptions(rank=4, targets=("down_proj", "gate_up_proj"))
    names = adapted(ours, options)
    write_adapter(tmp_path, lora_tensors(ours, names), options=options, base="somewhere", names=names)
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path, is_trainable=True)
    mine, reference = ours(TOKENS).logits, wrapped(TOKENS).logits
    assert torch.allclose(mine, reference, atol=1e-4)
    mine.square().mean().backward()
    reference.square().mean().backward()
    experts = "base_model.model.model.layers.1.mlp.experts"
    expected = {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    down = ours.get_submodule("model.layers.1.mlp.experts.down_proj_adapter")
    up = ours.get_submodule("model.layers.1.mlp.experts.gate_up_proj_adapter")
    for adapter, place in ((down, experts), (up, f"{experts}.base_layer")):
        a, b = adapter.lora_A.grad, adapter.lora_B.grad
        assert torch.allclose(a.flatten(0, 1), expected[f"{place}.lora_A.default.weight"], atol=1e-6)
        assert torch.allclose(b.permute(1, 2, 0).flatten(1), expected[f"{place}.lora_B.default.weight"], atol=1e-6)
        assert b.any()


def test_a_fresh_adapter_changes_nothing_and_the_base_keeps_its_names() -> None:
    base = random_mixture(0)
    tree = second_tree(base, share=True)
    names = inject_lora(tree, 4, 8.0, ("gate_up_proj", "down_proj"))
    assert torch.allclose(tree(TOKENS).logits, base(TOKENS).logits, atol=1e-6)
    assert names[0] == "model.layers.0.mlp.experts.gate_up_proj_adapter"
    trained = {name for name, p in tree.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{leaf}" for name in names for leaf in "AB"}
    frozen = {name: p for name, p in tree.named_parameters() if not p.requires_grad}
    assert checksum(frozen) == checksum(dict(base.named_parameters()))


def test_experts_are_adapted_only_if_they_are_named() -> None:
    names = inject_lora(random_mixture(0), 4, 8.0)
    assert not any("experts" in name for name in names)


def test_a_name_that_layers_and_experts_share_adapts_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=40, num_key_value_heads=2, **sizes, **experts))
    options = LoraOptions(rank=2, targets=("down_proj",))
    names = adapted(model, options)
    layer = "model.layers.0.mlp"
    assert names == (f"{layer}.shared_expert.down_proj", f"{layer}.experts.down_proj_adapter")
    write_adapter(tmp_path, lora_tensors(model, names), options=options, base="somewhere", names=names)
    assert read_adapter(tmp_path).modules == set(names)


@pytest.mark.parametrize("target", ["experts", "gate_proj", "mlp.gate", "w1"])
def test_other_names_of_experts_are_refused_with_the_names_to_use(target: str) -> None:
    with pytest.raises(ModelError, match="'gate_up_proj' or 'down_proj' for the weights of experts"):
        inject_lora(random_mixture(0), 4, 8.0, (target,))


def test_experts_of_another_kind_are_refused_with_what_can_be_adapted() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(num_hidden_layers=1, n_routed_experts=8))
    with pytest.raises(ModelError, match="those of `DeepseekV3ForCausalLM` cannot be adapted; name linear layers"):
        inject_lora(model, 4, 8.0, ("experts",))


def test_a_second_set_of_adapters_is_refused() -> None:
    model = random_mixture(0)
    inject_lora(model, 4, 8.0, ("down_proj",))
    with pytest.raises(ModelError, match="has an adapter already"):
        inject_lora(model, 4, 8.0, ("q_proj",))


def test_files_of_another_rank_or_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    model = random_mixture(0)
    options = LoraOptions(rank=4, targets=("down_proj",))
    names = adapted(model, options)
    write_adapter(tmp_path, lora_tensors(model, names), options=options, base="somewhere", names=names)
    with pytest.raises(ModelError, match="of another base"):
        merge_adapter(random_mixture(0, num_experts=4), read_adapter(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(ModelError, match=r"rank 3|another base"):
        merge_adapter(random_mixture(0), read_adapter(tmp_path))
