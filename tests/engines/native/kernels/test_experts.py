"""The experts of a layer against a loop over tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_references import gate as reference_gate
from torch import Tensor

from stretto.engines.native.kernels import cpu_layers
from stretto.engines.native.kernels.experts import choose_experts, grouped_experts, looped_experts


def given(tokens: int, experts: int = 6, chosen: int = 2, width: int = 16, inner: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, router = random(tokens, width), random(experts, width)
    weights, ids = choose_experts(x, router, chosen, normalized=True)
    return [x, ids, weights, random(experts, 2 * inner, width) * 0.2, random(experts, width, inner) * 0.2]


def by_token(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, weights, up, down = (each.double() for each in (x, weights, up, down))
    rows = []
    for token, (own, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        total = torch.zeros_like(x[0])
        for expert, share in zip(own, shares, strict=True):
            gate, value = (up[expert] @ x[token]).chunk(2)
            total += share * (down[expert] @ (F.silu(gate) * value))
        rows.append(total)
    return torch.stack(rows)


def grouped(*arguments: Tensor) -> Tensor:
    return grouped_experts(*arguments, reference_gate, "silu", 0)


def looped(*arguments: Tensor, padding: int = 8) -> Tensor:
    return looped_experts(*arguments, cpu_layers.gate, F.silu, padding)


@pytest.mark.parametrize("compute", [grouped, looped])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_token_gets_the_weighted_sum_of_its_experts(compute: Callable[..., Tensor], tokens: int) -> None:
    arguments = given(tokens)
    assert torch.allclose(compute(*arguments).double(), by_token(*arguments), atol=1e-4)


@pytest.mark.parametrize("compute", [grouped, looped])
def test_experts_without_tokens_are_skipped(compute: Callable[..., Tensor]) -> None:
    x, ids, weights, up, down = given(7)
    ids = torch.tensor([5, 1]).expand_as(ids).contiguous()
    assert torch.allclose(compute(x, ids, weights, up, down).double(), by_token(x, ids, weights, up, down), atol=1e-4)


def test_weights_are_shares_of_all_experts_unless_they_are_normalized() -> None:
    x, router = torch.randn(4, 8), torch.randn(6, 8)
    weights, ids = choose_experts(x, router, 3, normalized=False)
    shares = (x @ router.T).softmax(-1)
    assert torch.allclose(weights, shares.gather(1, ids))
    assert (weights.sum(1) < 1).all()
    normalized, same = choose_experts(x, router, 3, normalized=True)
    assert torch.equal(ids, same)
    assert torch.allclose(normalized.sum(1), torch.ones(4))


def test_on_a_cpu_a_token_does_not_depend_on_its_neighbours() -> None:
    torch.set_num_threads(1)
    x, ids, weights, up, down = given(40)
    whole = looped(x, ids, weights, up, down, padding=64)
    for start, end in ((0, 1), (3, 10), (17, 40)):
        own = slice(start, end)
        assert torch.equal(looped(x[own], ids[own], weights[own], up, down, padding=64), whole[own])
