"""The work around the products of experts on a GPU: each piece in one pass over memory.

`group` sorts the pairs of token and expert by expert, `gated` is the activation between the two products, and `combine`
is the weighted sum over a token's experts. `routed_experts` makes of these and of grouped products the experts of a
layer with a backward pass of its own, for the trainer; the engine's steps use the pieces (`engines/native/kernels`).

Nothing is added by atomics, so results do not change from run to run. Sizes depend on the number of tokens alone, and
the host reads nothing, except for torch's grouped products on devices below capability 9.0.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.models.expert_products import grouped_product
from stretto.models.triton_jit import kernel, power_of_two, tl

GROUP_BLOCK, GROUP_WARPS = 2_048, 4  # pairs that a program of `group` looks at together
COMBINE_COLUMNS, COMBINE_WARPS = 512, 4
COLUMNS_PER_WARP = 256  # of a program that has a whole row


class Grouping(NamedTuple):
    """The pairs of token and expert, sorted by expert. A pair's number is its place in the ids [T, k]."""

    order: Tensor  # [T * k] int32: the pair at each place; those of one group in the order of their numbers
    place: Tensor  # [T * k] int32: the place of each pair
    ends: Tensor  # [groups] int32: where the pairs of each group end


@kernel("pairs")
def _group_kernel(ids, order, place, ends, pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, pairs, BLOCK):
        own = tl.load(ids + at + pair, mask=at + pair < pairs, other=2147483647)
        before += (own < group).to(tl.int32)
    end = tl.sum(before, 0)
    for at in range(0, pairs, BLOCK):
        own = tl.load(ids + at + pair, mask=at + pair < pairs, other=2147483647)
        mine = (own == group).to(tl.int32)
        at_place = end + tl.cumsum(mine, 0) - mine
        tl.store(order + at_place, (at + pair).to(tl.int32), mask=mine != 0)
        tl.store(place + at + pair, at_place, mask=mine != 0)
        end += tl.sum(mine, 0)
    tl.store(ends + group, end)


@kernel()
def _combine_kernel(  # type: ignore[no-untyped-def]
    made, weights, place, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(CHOSEN):
        row = tl.load(place + token * CHOSEN + number).to(tl.int64)
        value = tl.load(made + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOSEN + number)
        total += value
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


@kernel()
def _gated_kernel(  # type: ignore[no-untyped-def]
    both, out, INNER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < INNER
    gate = tl.load(both + row * 2 * INNER + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * INNER + INNER + columns, mask=inside, other=0.0).to(tl.float32)
    made = gate * tl.sigmoid(gate) * value
    tl.store(out + row * INNER + columns, made.to(out.dtype.element_ty), mask=inside)


@kernel()
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    both, gradient, weights, order, d_both, d_weights, scaled, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < INNER
    pair = tl.load(order + row).to(tl.int64)
    weight = tl.load(weights + pair)
    gate = tl.load(both + row * 2 * INNER + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * INNER + INNER + columns, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + row * INNER + columns, mask=inside, other=0.0).to(tl.float32)
    kind = d_both.dtype.element_ty
    share = tl.sigmoid(gate)
    active = gate * share
    made = (active * value).to(kind).to(tl.float32)
    tl.store(d_weights + pair, tl.sum(made * incoming, 0))
    if SCALED:
        tl.store(scaled + row * INNER + columns, (made * weight).to(kind), mask=inside)
    incoming *= weight
    d_gate = incoming * value * share * (1.0 + gate * (1.0 - share))
    tl.store(d_both + row * 2 * INNER + columns, d_gate.to(kind), mask=inside)
    tl.store(d_both + row * 2 * INNER + INNER + columns, (incoming * active).to(kind), mask=inside)


def _warps(columns: int) -> int:
    return max(4, min(16, columns // COLUMNS_PER_WARP))


def group(ids: Tensor, groups: int) -> Grouping:
    """Returns the pairs in the order of their groups. `ids` [T, k] are their groups, below `groups`.

    A program looks for the pairs of one group, so this is for hundreds of groups, not for many thousands.
    """
    ids, pairs = ids.to(torch.int64).contiguous(), ids.numel()
    order, place = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    ends = torch.empty(groups, dtype=torch.int32, device=ids.device)
    block = min(GROUP_BLOCK, power_of_two(pairs, 128))
    _group_kernel[(groups,)](ids, order, place, ends, pairs, block, num_warps=GROUP_WARPS)
    return Grouping(order, place, ends)


def combine(
    made: Tensor,  # [T * k, width], sorted by expert
    weights: Tensor | None,  # [T, k] float32; None: all are 1
    place: Tensor,  # [T * k], where the row of each pair is
    chosen: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the weighted sum [T, width] over the rows of each token, added in float32 in the order of its pairs."""
    tokens, width = len(place) // chosen, made.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=made.device)
    columns = min(COMBINE_COLUMNS, power_of_two(width))
    _combine_kernel[(tokens, -(-width // columns))](
        made, weights, place, out, width, chosen, weights is not None, columns, num_warps=COMBINE_WARPS
    )
    return out


def gated(both: Tensor) -> Tensor:
    """Returns `silu(gate) * up` [rows, inner], rounded once; `both` [rows, 2 * inner] has gate and up side by side."""
    rows, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, inner)
    columns = power_of_two(inner)
    _gated_kernel[(rows,)](both, out, inner, columns, num_warps=_warps(columns))
    return out


def gated_backward(
    both: Tensor,  # [rows, 2 * inner]
    gradient: Tensor,  # [rows, inner]: of what `gated` returned, for a weight of 1
    weights: Tensor,  # [T, k] float32
    order: Tensor,  # [rows]
    *,
    scaled: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of `both` and of the weights [T, k], and `gated(both)` times its weight if asked for."""
    rows, inner = gradient.shape
    d_both, d_weights = torch.empty_like(both), torch.empty_like(weights)
    times_weight, columns = torch.empty_like(gradient) if scaled else None, power_of_two(inner)
    _gated_backward_kernel[(rows,)](
        both, gradient, weights, order, d_both, d_weights, times_weight, inner, columns, scaled,
        num_warps=_warps(columns),
    )  # fmt: skip
    return d_both, d_weights, times_weight


class _RoutedExperts(torch.autograd.Function):
    """The experts of a layer. It stores `x`, the first product and the routing, and computes the rest again.

    The gradient of a pair's weight is `made · g` with `made = gated down^T`, which is `gated · (g down)`: so the second
    product need not be stored, and the gradient of `gated` is that product times the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        chosen = ids.shape[1]
        own = group(ids, len(up))
        both = grouped_product(x.index_select(0, own.order // chosen), up.transpose(1, 2), own.ends)
        made = grouped_product(gated(both), down.transpose(1, 2), own.ends)
        ctx.save_for_backward(x, weights, up, down, both, *own)
        return combine(made, weights, own.place, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, up, down, both, order, place, ends = ctx.saved_tensors
        of_x, _, _, of_up, of_down = ctx.needs_input_grad
        chosen = weights.shape[1]
        tokens = order // chosen
        rows = gradient.to(x.dtype).index_select(0, tokens)
        inner = grouped_product(rows, down, ends)
        d_both, d_weights, scaled = gated_backward(both, inner, weights, order, scaled=of_down)
        d_x = d_up = d_down = None
        if scaled is not None:
            d_down = grouped_outer(rows, scaled, ends)
        if of_up:
            d_up = grouped_outer(d_both, x.index_select(0, tokens), ends)
        del rows, inner, scaled  # the next product is the largest
        if of_x:
            d_x = combine(grouped_product(d_both, up, ends), None, place, chosen, x.dtype)
        return d_x, None, d_weights, d_up, d_down


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns `left[rows of group g].T @ right[rows of group g]` for all groups [groups, left width, right width]."""
    return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)


def routed_experts(
    x: Tensor,  # [T, width]
    ids: Tensor,  # [T, k], the experts of each token
    weights: Tensor,  # [T, k] float32
    up: Tensor,  # [experts, 2 * inner, width]: gate and up
    down: Tensor,  # [experts, width, inner]
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts with SiLU, in float32. Differentiable.

    It rounds where `weighted_experts` rounds. Memory until the backward pass: the first product, 2 * inner values a
    pair, and `x`.
    """
    made: Tensor = _RoutedExperts.apply(x, ids, weights.contiguous(), up, down)  # type: ignore[no-untyped-call]
    return made
