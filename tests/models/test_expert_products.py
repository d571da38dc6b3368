"""Products of experts and of their adapters, against a loop over tokens and experts in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.expert_products import Factors, aligned_rank, sort_into_groups, weighted_experts

TOKENS, EXPERTS, CHOSEN, WIDTH, INNER, RANK, SCALE = 23, 6, 2, 16, 24, 4, 1.5


def given(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids with an expert that no token has, and everything that a gradient flows to."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.5).to(dtype).requires_grad_()

    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return ids, {
        "x": random(TOKENS, WIDTH), "shares": random(TOKENS, CHOSEN),
        "up": random(EXPERTS, 2 * INNER, WIDTH), "down": random(EXPERTS, WIDTH, INNER),
        "up_a": random(EXPERTS, RANK, WIDTH), "up_b": random(EXPERTS, 2 * INNER, RANK),
        "down_a": random(EXPERTS, RANK, INNER), "down_b": random(EXPERTS, WIDTH, RANK),
    }  # fmt: skip


def grouped(ids: Tensor, of: dict[str, Tensor]) -> Tensor:
    factors = [
        Factors(of[f"{name}_a"].transpose(1, 2), of[f"{name}_b"].transpose(1, 2), SCALE) for name in ("up", "down")
    ]
    return weighted_experts(of["x"], ids, of["shares"], of["up"], of["down"], F.silu, *factors)


def by_expert(ids: Tensor, of: dict[str, Tensor]) -> Tensor:
    rows = []
    for token in range(TOKENS):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for place, expert in enumerate(ids[token].tolist()):
            up = of["up"][expert] + SCALE * of["up_b"][expert] @ of["up_a"][expert]
            down = of["down"][expert] + SCALE * of["down_b"][expert] @ of["down_a"][expert]
            gate, value = (up @ of["x"][token]).chunk(2)
            total = total + of["shares"][token, place] * (down @ (F.silu(gate) * value))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_values_and_gradients_are_those_of_experts_one_by_one(dtype: torch.dtype, tolerance: float) -> None:
    ids, of = given(dtype)
    exact = {name: each.detach().double().requires_grad_() for name, each in of.items()}
    made, expected = grouped(ids, of), by_expert(ids, exact)
    assert torch.allclose(made.double(), expected, atol=tolerance)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (made * direction.to(dtype)).sum().backward()
    (expected * direction).sum().backward()
    for name, each in of.items():
        reference = exact[name].grad
        assert each.grad is not None, name
        assert reference is not None, name
        assert torch.allclose(each.grad.double(), reference, atol=tolerance, rtol=tolerance), name
    assert not of["up_a"].grad[EXPERTS - 1].any(), "an expert without tokens has no gradient"
    assert of["up_a"].grad[0].any()


def test_pairs_are_sorted_by_group_and_empty_groups_end_where_they_begin() -> None:
    order, ends = sort_into_groups(torch.tensor([3, 0, 3, 1]), 5)
    assert order.tolist() == [1, 3, 0, 2]
    assert ends.tolist() == [1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("rank", "dtype", "expected"), [(3, torch.float32, 4), (4, torch.float32, 4), (3, torch.bfloat16, 8)]
)
def test_a_rank_is_padded_to_what_grouped_products_support(rank: int, dtype: torch.dtype, expected: int) -> None:
    assert aligned_rank(rank, dtype) == expected
