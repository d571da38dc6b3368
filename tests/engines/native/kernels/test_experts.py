"""The experts of a layer against a loop over tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_references import gate as reference_gate
from torch import Tensor

from stretto.engines.native.kernels import cpu_layers
from stretto.engines.native.kernels.experts import (
    ExpertAdapters,
    SlotFactors,
    choose_experts,
    grouped_experts,
    looped_experts,
)

pytestmark = pytest.mark.usefixtures("interpreted")


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


ON_CUDA = torch.cuda.is_available()


def grouped(*arguments: Tensor, adapters: ExpertAdapters | None = None) -> Tensor:
    """Runs by the interpreter: on CUDA, grouped products are in bfloat16 alone."""
    if ON_CUDA:
        pytest.skip("float32 is for a CPU: `test_expert_decode.py` and `test_expert_slots.py` compare on CUDA")
    return grouped_experts(*arguments, reference_gate, "silu", 0, adapters)


def looped(*arguments: Tensor, padding: int = 8, adapters: ExpertAdapters | None = None) -> Tensor:
    return looped_experts(*arguments, cpu_layers.gate, F.silu, padding, adapters)


def adapters_of(tokens: int, up: Tensor, down: Tensor, slots: int = 3, rank: int = 4) -> ExpertAdapters:
    """Random adapters in all slots, and a slot for each token."""
    generator = torch.Generator().manual_seed(tokens + 1)

    def factors(weight: Tensor) -> SlotFactors:
        experts, out, width = weight.shape
        shapes = (experts, slots, rank, width), (experts, slots, rank, out)
        return SlotFactors(*(torch.randn(*shape, generator=generator) * 0.3 for shape in shapes))

    own = torch.randint(0, slots, (tokens,), generator=generator)
    return ExpertAdapters(factors(up), factors(down), own, 1.5)


def merged(weight: Tensor, factors: SlotFactors, slot: int, scale: float) -> Tensor:
    a, b = factors.a[:, slot].double(), factors.b[:, slot].double()
    return weight.double() + scale * b.transpose(1, 2) @ a


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


@pytest.mark.parametrize("compute", [grouped, looped])
@pytest.mark.parametrize("only", ["up", "down", "both"])
def test_every_token_gets_the_adapters_of_its_own_slot(compute: Callable[..., Tensor], only: str) -> None:
    x, ids, weights, up, down = given(40)
    adapters = adapters_of(40, up, down)
    if only != "both":
        adapters = adapters._replace(**{"down" if only == "up" else "up": None})
    found = compute(x, ids, weights, up, down, adapters=adapters).double()
    for token in range(40):
        slot, own = int(adapters.slots[token]), slice(token, token + 1)
        of_up = up if adapters.up is None else merged(up, adapters.up, slot, 1.5)
        of_down = down if adapters.down is None else merged(down, adapters.down, slot, 1.5)
        assert torch.allclose(found[own], by_token(x[own], ids[own], weights[own], of_up, of_down), atol=1e-4)


def test_a_version_that_is_not_finite_reaches_no_token_of_another() -> None:
    x, ids, weights, up, down = given(20)
    adapters = adapters_of(20, up, down)
    expected = grouped(x, ids, weights, up, down, adapters=adapters)
    assert adapters.up is not None
    adapters.up.b[:, 1] = float("nan")
    found = grouped(x, ids, weights, up, down, adapters=adapters)
    others = adapters.slots != 1
    assert torch.equal(found[others], expected[others])
    assert found[~others].isnan().all()


def test_on_a_cpu_a_token_with_adapters_does_not_depend_on_its_neighbours() -> None:
    torch.set_num_threads(1)
    x, ids, weights, up, down = given(40)
    adapters = adapters_of(40, up, down)
    whole = looped(x, ids, weights, up, down, padding=64, adapters=adapters)
    for start, end in ((0, 1), (3, 10), (17, 40)):
        own = slice(start, end)
        part = adapters._replace(slots=adapters.slots[own])
        assert torch.equal(looped(x[own], ids[own], weights[own], up, down, padding=64, adapters=part), whole[own])
