"""The kernels around the products of experts, and their backward pass; on the CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from kernel_interpreter import interpreted_kernels

from stretto.models.expert_kernels import combine, gated, group, routed_experts
from stretto.models.expert_products import sort_into_groups, weighted_experts

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # of grouped products
TOLERANCE = 2e-2 if device == "cuda" else 1e-5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_kernels(monkeypatch):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def experts_of_tokens(tokens: int, experts: int, chosen: int) -> Tensor:
    return random(tokens, experts, seed=7).topk(chosen).indices


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 2), (33, 8, 3), (17, 128, 8), (600, 4, 4)])
def test_pairs_are_grouped_as_a_stable_sort_would(tokens: int, experts: int, chosen: int) -> None:
    ids = experts_of_tokens(tokens, experts, chosen)
    order, place, ends = group(ids, experts)
    wanted_order, wanted_ends = sort_into_groups(ids.reshape(-1), experts)
    assert torch.equal(order.long(), wanted_order)
    assert torch.equal(ends, wanted_ends)
    assert torch.equal(order.long()[place.long()], torch.arange(tokens * chosen, device=device))


def test_ids_may_be_a_part_of_a_larger_record() -> None:
    record = torch.stack([experts_of_tokens(9, 8, 2), experts_of_tokens(9, 8, 2).flip(0)], 1)  # [tokens, layers, k]
    for layer in range(2):
        assert torch.equal(group(record[:, layer], 8).order, group(record[:, layer].contiguous(), 8).order)


def test_rows_are_added_by_their_weights() -> None:
    made, weights = random(15, 40), random(5, 3).abs()
    place = torch.randperm(15, generator=torch.Generator().manual_seed(0)).int().to(device)
    rows = made[place.long()].view(5, 3, 40)
    torch.testing.assert_close(combine(made, weights, place, 3), (rows * weights[..., None]).sum(1))
    torch.testing.assert_close(combine(made, None, place, 3), rows.sum(1))


def test_gate_and_up_are_multiplied() -> None:
    both = random(7, 48)
    torch.testing.assert_close(gated(both), F.silu(both[:, :24]) * both[:, 24:])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(5, 6, 2), (33, 8, 3), (1, 4, 1)])
def test_values_and_gradients_are_those_of_plain_operations(
    tokens: int, experts: int, chosen: int, frozen: bool
) -> None:
    """Some experts have no tokens."""
    ids = experts_of_tokens(tokens, experts, chosen).clamp_(1)
    ids[:, 1:] = torch.where(ids[:, 1:] == ids[:, :1], (ids[:, :1] % (experts - 1)) + 1, ids[:, 1:])
    given: list[Tensor] = [
        random(tokens, 64).to(dtype), random(tokens, chosen).softmax(-1), (random(experts, 96, 64) * 0.2).to(dtype),
        (random(experts, 64, 48) * 0.2).to(dtype),
    ]  # fmt: skip
    incoming, found = random(tokens, 64, seed=3), []
    for compute, kind in ((routed_experts, None), (weighted_experts, torch.float64)):
        x, weights, up, down = (
            (each if kind is None else each.to(kind)).detach().clone().requires_grad_(place < 2 or not frozen)
            for place, each in enumerate(given)
        )
        more: tuple[Any, ...] = () if kind is None else (F.silu,)
        made = compute(x, ids, weights, up, down, *more)
        made.backward(incoming.to(made.dtype))
        found.append([made.detach(), x.grad, weights.grad, up.grad, down.grad])
    for ours, wanted in zip(*found, strict=True):
        if wanted is None:
            assert ours is None
            continue
        assert ours is not None
        assert float((ours - wanted).norm() / wanted.norm()) < TOLERANCE


def test_a_backward_pass_gives_the_same_bits_again() -> None:
    ids, weights = experts_of_tokens(33, 8, 3), random(33, 3).softmax(-1)
    up, down = (random(8, 96, 64) * 0.2).to(dtype), (random(8, 64, 48) * 0.2).to(dtype)
    found = []
    for _ in range(2):
        given = [each.detach().clone().requires_grad_() for each in (random(33, 64).to(dtype), weights, up, down)]
        routed_experts(given[0], ids, *given[1:]).square().sum().backward()
        found.append([each.grad for each in given])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("narrow", [torch.uint8, torch.int16])
def test_ids_may_be_as_narrow_as_records_are(narrow: torch.dtype) -> None:
    ids = experts_of_tokens(33, 200, 3)
    for ours, wanted in zip(group(ids.to(narrow), 200), group(ids, 200), strict=True):
        assert torch.equal(ours, wanted)
