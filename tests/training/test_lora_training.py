import peft
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from training_cases import tiny
from transformers import GPT2Config, GPT2LMHeadModel

from stretto.errors import ModelError
from stretto.models.loading import second_tree
from stretto.models.lora import LoraLinear, LoraOptions, adapted_modules, inject_lora, lora_tensors

TOKENS = torch.arange(20)[None] % 23


def randomize(model, names):
    generator = torch.Generator().manual_seed(1)
    for name in names:
        weight = model.get_submodule(name).lora_B
        weight.data = torch.randn(weight.shape, generator=generator) * 0.1


def test_outputs_and_gradients_are_those_of_peft():
    base = tiny()
    ours, theirs = second_tree(base, share=True), second_tree(base, share=False)
    names = inject_lora(ours, rank=4, alpha=12.0)
    randomize(ours, names)
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(names)))
    tensors = lora_tensors(ours, names)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            parameter.data.copy_(tensors[own])
    mine, reference = ours(TOKENS).logits, wrapped(TOKENS).logits
    assert torch.allclose(mine, reference, atol=1e-5)
    assert not torch.allclose(mine, base(TOKENS).logits, atol=1e-2)
    mine.square().mean().backward()
    reference.square().mean().backward()
    expected = {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(got) == len(expected) == 2 * len(names)
    for name, gradient in got.items():
        module, _, leaf = name.rpartition(".")
        assert torch.allclose(gradient, expected[f"base_model.model.{module}.{leaf}.default.weight"], atol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_shares_the_base():
    base = tiny()
    before = base(TOKENS).logits
    tree = second_tree(base, share=True)
    names = inject_lora(tree, rank=4, alpha=8.0)
    assert torch.equal(tree(TOKENS).logits, before)
    for name in names:
        assert tree.get_submodule(name).weight is base.get_submodule(name).weight
    assert {n for n, p in tree.named_parameters() if p.requires_grad} == {f"{n}.lora_{x}" for n in names for x in "AB"}


def test_first_values_follow_the_seed_and_have_pefts_spread():
    one, same, other = tiny(), tiny(), tiny()
    for model, seed in ((one, 3), (same, 3), (other, 4)):
        names = inject_lora(model, rank=64, alpha=8.0, seed=seed)
    first, second, third = (lora_tensors(m, names) for m in (one, same, other))
    assert all(torch.equal(first[n], second[n]) for n in first)
    name = f"{names[0]}.lora_A"
    assert not torch.equal(first[name], third[name])
    assert first[name].abs().max() <= 32**-0.5
    assert first[name].abs().max() > 0.95 * 32**-0.5  # uniform up to 1 / sqrt(in)
    assert not torch.equal(first[f"{names[0]}.lora_A"], first[f"{names[1]}.lora_A"][:, :32])


def test_every_linear_layer_but_the_head_is_adapted_unless_targets_say_otherwise():
    model = tiny("llama")
    every = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert set(adapted_modules(model)) == every - {"lm_head"}
    assert set(adapted_modules(model, ("q_proj", "layers.1.mlp.up_proj"))) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_a_model_without_linear_layers_is_refused_with_what_to_do():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2))
    said = "`model.lora` finds nothing to adapt: `GPT2LMHeadModel` has no linear layer .* leave `model.lora` out .*, or"
    with pytest.raises(ModelError, match=said):
        adapted_modules(model)


def test_targets_that_name_nothing_and_a_second_set_are_refused():
    model = tiny()
    for wrong in ("q_prj", "lm_head", "roj"):
        with pytest.raises(ModelError, match=f"{wrong}.*name some of down_proj"):
            inject_lora(model, 4, 8.0, targets=("q_proj", wrong))
    inject_lora(model, 4, 8.0, targets=("q_proj",))
    with pytest.raises(ModelError, match="already"):
        inject_lora(model, 4, 8.0)


def test_adapters_of_a_half_precision_base_are_float32_and_published_in_its_type():
    model = tiny(dtype=torch.bfloat16)
    names = inject_lora(model, 4, 8.0)
    module = model.get_submodule(names[0])
    assert isinstance(module, LoraLinear)
    assert module.lora_A.dtype == torch.float32
    assert model(TOKENS).logits.dtype == torch.bfloat16
    assert {t.dtype for t in lora_tensors(model, names).values()} == {torch.bfloat16}


def test_options_out_of_range_are_named():
    for wrong in ({"rank": 0}, {"alpha": 0.0}, {"ranks": 4}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            LoraOptions(**wrong)
    assert LoraOptions(rank=8).scale == 2.0
    assert LoraOptions(rank=8, alpha=4).scale == 0.5
