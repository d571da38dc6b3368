"""Linear layers as one product: their memory, and the adapters of each layer and slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.engines.native import batched_linears
from stretto.engines.native.batched_linears import JoinedProduct, StackedProduct, joined
from stretto.engines.native.lora_slots import SlotMask, SlottedLinear


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
    fused = JoinedProduct(*layers)
    put(layers[2], 0, torch.randn(3, 8, generator=generator), torch.randn(5, 3, generator=generator))
    x = torch.randn(7, 8, generator=generator)
    with torch.inference_mode():
        mask.choose(torch.tensor([0, 1, 0, 1, 1, 0, 0]))
        mask.scale = 2.0
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        torch.testing.assert_close(fused(x), expected)
        stream = torch.ones(7, 15)
        assert fused.add_to(stream, x) is None
        torch.testing.assert_close(stream, expected + 1)
        put(layers[2], 0, torch.zeros(3, 8), torch.zeros(5, 3))
        assert not fused.b[3:, 10:].any()


def test_stacked_weights_stay_the_parameters_of_their_layers() -> None:
    mask = SlotMask(2, 3, torch.device("cpu"))
    bases = [torch.nn.Linear(8, n) for n in (6, 4)]
    values = [base.weight.detach().clone() for base in bases]
    layers: list[Any] = [SlottedLinear(bases[0], 2, 3, mask), bases[1]]
    product = StackedProduct(*layers)
    put(layers[0], 1, torch.full((3, 8), 2.0), torch.full((6, 3), 5.0))
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        y = product(x)
        torch.testing.assert_close(y[:, :10], torch.cat([base(x) for base in bases], 1))
        torch.testing.assert_close(y[:, 13:16], 2.0 * x.sum(1, keepdim=True).expand(-1, 3))
        assert not y[:, 16:].any(), "a layer without an adapter has columns of zeros"
        torch.testing.assert_close(product.add_to(torch.ones(7, 10), x), y)
    assert all(
        torch.equal(base.weight, value) and base.weight.is_contiguous()
        for base, value in zip(bases, values, strict=True)
    )
    assert product.bs[0] is layers[0].lora_b
    assert product.bs[1] is None


def test_a_product_of_many_tokens_adds_to_the_stream_itself(monkeypatch: Any) -> None:
    """Torch has that for half precision on CUDA; the same in float32 stands in for it."""
    monkeypatch.setattr(batched_linears, "ADDED_FROM", 4)
    monkeypatch.setattr(batched_linears, "adds_in_place", lambda *_: True)
    added = torch.ops.aten.addmm
    stand_in = SimpleNamespace(dtype_out=lambda c, x, w, dtype, out: added.out(c, x, w, out=out))
    monkeypatch.setattr(torch.ops.aten, "addmm", stand_in)
    layer = torch.nn.Linear(8, 6, bias=False)
    with torch.inference_mode():
        x, stream = torch.randn(4, 8), torch.randn(4, 6)
        expected = stream + layer(x)
        product = StackedProduct(layer)
        assert product.add_to(stream, x) is None
        torch.testing.assert_close(stream, expected)
        assert product.add_to(stream[:3], x[:3]) is not None  # few tokens
        adapted = SlottedLinear(layer, 2, 3, SlotMask(2, 3, torch.device("cpu")))
        assert StackedProduct(adapted).add_to(stream, x) is not None
        assert StackedProduct(torch.nn.Linear(8, 6)).add_to(stream, x) is not None  # it has a bias


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_the_stream_are_float32_on_a_gpu(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(256, 512, bias=False, device="cuda", dtype=dtype)
    with torch.inference_mode():
        x, stream = torch.randn(2048, 256, device="cuda", dtype=dtype), torch.randn(2048, 512, device="cuda")
        expected = stream.double() + x.double() @ layer.weight.double().t()
        added = StackedProduct(layer).add_to(stream, x)
        found = stream if added is None else stream + added
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
