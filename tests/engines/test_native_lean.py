"""The lean forward: where it runs, what it computes, and whose memory it reads."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SHAPE, adapter, build, drive, native, prompt_of
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from stretto.engines.native.lean import Projection, is_plain, joined
from stretto.engines.native.lora import SlotMask, SlottedLinear
from stretto.types import Request, Sampling


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
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval() if name == "mistral" else build(name)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "mistral"])
def test_it_computes_what_the_modules_of_transformers_compute(name: str, kind: str) -> None:
    model = model_of(name)
    engine = native(model, kind, versions=(0, 1))
    assert engine._work.forward.lean
    assert engine.exact
    lean = drive(engine, requests_of(8))
    engine._work.forward.prepare(lean=False, max_tokens=64, max_context=256)
    stock = drive(engine, requests_of(8))
    for number, completion in lean.items():
        assert np.array_equal(completion.tokens, stock[number].tokens)
        np.testing.assert_allclose(completion.logprobs, stock[number].logprobs, atol=1e-4)


def test_models_that_it_does_not_know_or_that_were_changed_keep_their_modules() -> None:
    assert not is_plain(build("qwen3-moe"))
    model = build("qwen3")
    assert is_plain(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not is_plain(model)
    handle.remove()
    model.model.layers[0].mlp.forward = lambda x: x
    assert not is_plain(model)


class CenteredNorm(torch.nn.Module):
    """Looks like a root-mean-square norm and is none."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = like.weight, like.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, None, self.variance_epsilon)


def test_where_it_does_not_agree_with_the_model_the_modules_run(caplog: Any) -> None:
    model = build("qwen3")
    model.model.norm = CenteredNorm(model.model.norm)
    with caplog.at_level(logging.WARNING):
        engine = native(model, "full")
    assert not engine._work.forward.lean
    assert "lean forward" in caplog.text
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
        for projection in engine._work.forward._decoders[0].projections:
            assert projection.weight.data_ptr() in places


def test_joined_weights_follow_what_is_written_into_the_parts() -> None:
    parts = [torch.nn.Parameter(torch.randn(n, 5), requires_grad=False) for n in (4, 2, 3)]
    whole = joined(parts)
    assert torch.equal(whole, torch.cat([p.detach() for p in parts]).t())
    parts[1].copy_(torch.full((2, 5), 7.0))
    assert (whole[:, 4:6] == 7.0).all()
    assert joined(parts).data_ptr() == whole.data_ptr()
    assert joined(parts[:2]).data_ptr() != whole.data_ptr()  # a part of the storage is not the matrix they make


def put(layer: SlottedLinear, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
    for place, part in zip(layer.resident(slot), (a, b), strict=True):
        place.copy_(part)


def test_adapters_in_a_fused_product_are_those_of_their_layer_and_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = SlotMask(2, 3, torch.device("cpu"))
    bases = [torch.nn.Linear(8, n, bias=False) for n in (6, 4, 5)]
    layers: list[Any] = [SlottedLinear(bases[0], 2, 3, mask), bases[1], SlottedLinear(bases[2], 2, 3, mask)]
    put(layers[0], 1, torch.randn(3, 8, generator=generator), torch.randn(6, 3, generator=generator))
    fused = Projection(*layers)
    put(layers[2], 0, torch.randn(3, 8, generator=generator), torch.randn(5, 3, generator=generator))
    x = torch.randn(7, 8, generator=generator)
    with torch.inference_mode():
        mask.choose(torch.tensor([0, 1, 0, 1, 1, 0, 0]))
        mask.scale = 2.0
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        torch.testing.assert_close(fused(x), expected)
        torch.testing.assert_close(fused.add_to(torch.ones(7, 15), x), expected + 1)
        put(layers[2], 0, torch.zeros(3, 8), torch.zeros(5, 3))
        assert not fused.b[3:, 10:].any()


def test_what_is_resident_after_a_load_is_what_was_sent() -> None:
    model = build("qwen3")
    engine = native(model, versions=(0, 1))
    for name, linear in engine._slots._linears.items():  # type: ignore[union-attr]
        for version in (0, 1):
            a, b = linear.resident(version)
            assert torch.equal(a, adapter(model, version).tensors[f"{name}.lora_A"])
            assert torch.equal(b, adapter(model, version).tensors[f"{name}.lora_B"])
