"""The operations of a decoder on a CPU, against the definitions of the kernels."""

from __future__ import annotations

from typing import Any

import kernel_references
import pytest
import torch
from torch import Tensor

from stretto.engines.native.kernels import cpu_layers
from stretto.engines.native.lora_slots import SlotMask

EPSILON = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), atol=TOLERANCE[ours.dtype], rtol=1e-2)


@types
def test_the_norm_of_the_stream(dtype: torch.dtype) -> None:
    stream, weight = random(5, 24, dtype=dtype), random(24, dtype=dtype, seed=1)
    slots = torch.zeros(5, dtype=torch.int64)
    ours = cpu_layers.add_norm(stream, None, weight, EPSILON, slots, None, 0, 1.0)
    theirs = kernel_references.add_norm(stream.float(), None, weight, EPSILON, slots, None, 0, 1.0)
    close(ours, theirs.to(dtype))


@types
@pytest.mark.parametrize("normalized", [False, True])
def test_heads_are_normalized_rotated_and_cached(dtype: torch.dtype, normalized: bool) -> None:
    tokens, heads, kv_heads, size = 6, 4, 2, 8
    angles = torch.rand(16, size // 2, generator=torch.Generator().manual_seed(2)) * 6.0
    table = torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), 1)
    signed = torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), 1)
    positions, slots = torch.tensor([3, 0, 15, 7, 7, 1]), torch.zeros(tokens, dtype=torch.int64)
    writes = torch.tensor([9, 2, 4, 0, 8, 1])
    qkv = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    weights = [random(size, dtype=dtype, seed=seed) if normalized else None for seed in (4, 5)]
    results: list[tuple[Tensor, Tensor]] = []
    for function, given in (
        (cpu_layers.split_heads, cpu_layers.prepare(signed.to(dtype), positions, slots, None)),
        (kernel_references.split_heads, table.to(dtype)),
    ):
        cache = torch.full((2, 10, kv_heads, size), 7.0)
        arguments: Any = (qkv, heads, kv_heads, size, *weights, EPSILON, given, positions, slots, (None, None, None))
        q = function(*arguments, 0, 1.0, writes, cache[0], cache[1])
        results.append((q, cache))
    close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=TOLERANCE[dtype], rtol=1e-2)
    assert (results[0][1][:, [3, 5, 6, 7]] == 7.0).all(), "nothing else is written"


@types
@pytest.mark.parametrize(
    ("module", "name"), [(torch.nn.SiLU(), "silu"), (torch.nn.GELU(), "gelu"), (torch.nn.GELU("tanh"), "gelu_tanh")]
)
def test_the_gated_feed_forward(dtype: torch.dtype, module: Any, name: str) -> None:
    gate_up, slots = random(5, 24, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    ours = cpu_layers.gate(gate_up, 12, cpu_layers.activation(module), slots, (None, None), 0, 1.0)
    close(ours, kernel_references.gate(gate_up, 12, name, slots, None, 0, 1.0))


def test_a_forward_tells_the_products_the_slot_of_each_token() -> None:
    mask = SlotMask(2, 3, torch.device("cpu"))
    cpu_layers.prepare(torch.zeros(4, 8), torch.tensor([0, 1]), torch.tensor([1, 0]), mask)
    assert mask.foreign.tolist() == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
