"""The fused decoder: when it runs, its results, and the memory that it reads."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SHAPE, adapter, build, drive, native, prompt_of
from kernel_references import REFERENCE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stretto.engines.native.fused import FusedDecoder, fits
from stretto.engines.native.kernels.kernel_set import CPU, TRITON, Kernels
from stretto.types import Request, Sampling

MIXTURES = ("qwen3-moe", "mixtral")


def requests_of(count: int) -> list[Request]:
    return [Request(i, i % 2, prompt_of(7 + 11 * i, i), i, Sampling(16)) for i in range(count)]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
        return model
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)).eval()
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval() if name == "mistral" else build(name)


def decoders_of(engine: Any) -> Any:
    """The decoders that the engine's steps run."""
    steps = engine._steps
    return (steps._decodes if steps._mixed is None else steps._mixed)._decoders


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "mistral", "qwen3-moe", "mixtral"])
def test_it_computes_the_same_as_the_modules_of_transformers(
    name: str, kind: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = native(model_of(name), kind, versions=(0, 1), kernels=kernels)
    assert all(isinstance(decoder, FusedDecoder) for decoder in decoders_of(engine))
    assert engine.exact == (kernels is CPU)
    fused = drive(engine, requests_of(8))
    monkeypatch.setattr("stretto.engines.native.engine.fits", lambda *_: False)
    other = native(model_of(name), kind, versions=(0, 1), kernels=kernels)
    assert not any(isinstance(decoder, FusedDecoder) for decoder in decoders_of(other))
    stock = drive(other, requests_of(8))
    for number, completion in fused.items():
        assert np.array_equal(completion.tokens, stock[number].tokens)
        np.testing.assert_allclose(completion.logprobs, stock[number].logprobs, atol=1e-4)
        assert (completion.routing is None) == (stock[number].routing is None) == (name not in MIXTURES)
        if completion.routing is not None and stock[number].routing is not None:
            # A fused prefill computes the rest of the last layer for the last token of a prompt alone.
            skipped = len(requests_of(8)[number].prompt) - 1
            for start, layers in ((0, slice(0, -1)), (skipped, slice(None))):
                ours, theirs = (np.sort(each.routing[start:, layers]) for each in (completion, stock[number]))
                assert np.array_equal(ours, theirs)


def test_the_activation_and_the_type_must_be_those_of_the_kernels() -> None:
    relu = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu"))
    assert fits(relu, CPU)
    assert not fits(relu, TRITON)
    half = build("qwen3").half()
    assert fits(half, TRITON)
    assert not fits(half, CPU), "it would move weights, by whose place a CPU rounds"
    assert fits(build("qwen3-moe"), CPU)
    assert not fits(build("qwen3-moe"), TRITON), "grouped products on a GPU are for bfloat16"
    assert fits(build("qwen3-moe").bfloat16(), TRITON)


class CenteredNorm(torch.nn.Module):
    """Looks like a root-mean-square norm and is none."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = like.weight, like.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, None, self.variance_epsilon)


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_if_it_does_not_agree_with_the_model_the_modules_run(kernels: Kernels, caplog: Any) -> None:
    model = build("qwen3")
    model.model.norm = CenteredNorm(model.model.norm)
    with caplog.at_level(logging.WARNING):
        engine = native(model, "full", kernels=kernels)
    assert not any(isinstance(decoder, FusedDecoder) for decoder in decoders_of(engine))
    assert "instead of the fused decoder" in caplog.text
    prompt = prompt_of(20)
    done = drive(engine, [Request(0, 0, prompt, 0, Sampling(8, temperature=0.0))])[0]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert done.tokens.tolist() == expected[0, 20:].tolist()


def test_engines_over_one_base_read_the_same_memory() -> None:
    model = build("llama")
    objects = [id(p) for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    first = native(model)
    places = [p.data_ptr() for p in model.parameters()]
    second = native(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert [id(p) for p in model.parameters()] == objects
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    for engine in (first, second):
        assert all(product.weight.data_ptr() in places for product in decoders_of(engine)[0].layers)


def test_what_is_resident_after_a_load_is_what_was_sent() -> None:
    model = build("qwen3")
    engine = native(model, versions=(0, 1))
    for name, linear in engine._slots._adapted.items():  # type: ignore[union-attr]
        for version in (0, 1):
            a, b = linear.resident(version)
            assert torch.equal(a, adapter(model, version).tensors[f"{name}.lora_A"])
            assert torch.equal(b, adapter(model, version).tensors[f"{name}.lora_B"])
