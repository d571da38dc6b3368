"""The experts of a decode step: few tokens an expert, so that reading the experts' weights is what takes the time.

Five launches a layer (`group` and `combine` are in `models/expert_kernels.py`). Prompts, whose products are bound by
arithmetic, go through grouped products (`experts.py`).

- `choose`: the experts of each token, and their shares.
- `group`: the pairs of token and expert in the order of their experts. Pairs of one expert stay in the order of tokens.
- `gated`: the products with gate and up of each pair's expert, and the activation.
- `down`: the last product.
- `combine`: the weighted sum over the experts of each token, in the order of their places.

A program of `gated` or `down` has a block of columns of one expert and loops over that expert's pairs, in tiles of
rows. So a weight is read once for each tile, which is once if there are few pairs. Grids depend on shapes alone, so a
step can be captured. Programs of experts without tokens end at once.

Values are rounded where `experts.py` and the trainer round them: each product to the type of `x`, the activation's
product with up to the type of `x`, and nothing else.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.engines.native.kernels.layers import activate, check_activation
from stretto.models.expert_kernels import combine, group
from stretto.models.triton_jit import kernel, power_of_two, tl

CHOOSE_WARPS = 1


class Tiling(NamedTuple):
    """The shape of a program of `gated` or `down`."""

    rows: int  # pairs of one expert
    columns: int  # of the output; of gate and of up each
    depth: int  # of the inner dimension, in one stage
    warps: int
    stages: int


# The best of those that `bench/gpu/experts.py --tune` tries on an H200: (up to so many pairs an expert, gated, down).
TILINGS: tuple[tuple[int, Tiling, Tiling], ...] = (
    (8, Tiling(16, 32, 128, 4, 3), Tiling(16, 64, 128, 4, 4)),
    (32, Tiling(32, 64, 128, 4, 3), Tiling(32, 64, 128, 4, 4)),
)


def tilings(pairs: int, experts: int) -> tuple[Tiling, Tiling] | None:
    """Returns the tilings of `gated` and `down` for so many pairs; None: grouped products are faster."""
    return next(((gated, down) for most, gated, down in TILINGS if pairs <= most * experts), None)


@kernel()
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, weights, ids, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PADDED)
    row = tl.load(logits + token * STRIDE + experts, mask=experts < EXPERTS, other=float("-inf"))
    left = tl.exp(row - tl.max(row, 0))
    whole = tl.sum(left, 0)
    left = tl.where(experts < EXPERTS, left, -1.0)
    if NORMALIZED:
        whole = 0.0
        rest = left
        for _ in tl.static_range(CHOSEN):
            largest, expert = tl.max(rest, 0, return_indices=True)
            whole += largest
            rest = tl.where(experts == expert, -1.0, rest)
    for place in tl.static_range(CHOSEN):
        largest, expert = tl.max(left, 0, return_indices=True)
        expert = tl.minimum(expert, EXPERTS - 1)  # of logits that are not numbers
        tl.store(weights + token * CHOSEN + place, largest / whole)
        tl.store(ids + token * CHOSEN + place, expert.to(tl.int64))
        left = tl.where(experts == expert, -1.0, left)


@kernel()
def _load(  # type: ignore[no-untyped-def]
    start, along, at, LENGTH: tl.constexpr, inside, EVEN: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Returns a tile of a matrix: `start` has a pointer for each line, `along` the places in a line from `at` on."""
    if EVEN:
        return tl.load(start + at + along, mask=inside, other=0.0, eviction_policy=POLICY)
    return tl.load(start + at + along, mask=inside & (at + along < LENGTH), other=0.0, eviction_policy=POLICY)


@kernel()
def _gated_kernel(  # type: ignore[no-untyped-def]
    x, up, order, ends, out, X_STRIDE: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    along, inside = tl.arange(0, DEPTH), (columns < INNER)[None, :]
    of_gate = up + expert.to(tl.int64) * (2 * INNER * WIDTH) + columns[None, :] * WIDTH
    of_up = of_gate + INNER * WIDTH
    kind = out.dtype.element_ty
    for first in range(start, end, ROWS):
        pairs = first + tl.arange(0, ROWS)
        own = pairs < end
        tokens = tl.load(order + pairs, mask=own, other=0) // CHOSEN
        rows = x + tokens.to(tl.int64)[:, None] * X_STRIDE
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        value = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, WIDTH, DEPTH):
            tile = _load(rows, along[None, :], at, WIDTH, own[:, None], WIDTH % DEPTH == 0, "evict_last")
            factor = _load(of_gate, along[:, None], at, WIDTH, inside, WIDTH % DEPTH == 0, "evict_first")
            gate = tl.dot(tile, factor, gate, input_precision="ieee")
            factor = _load(of_up, along[:, None], at, WIDTH, inside, WIDTH % DEPTH == 0, "evict_first")
            value = tl.dot(tile, factor, value, input_precision="ieee")
        made = activate(gate.to(kind).to(tl.float32), ACTIVATION) * value.to(kind).to(tl.float32)
        place = out + pairs.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(place, made.to(kind), mask=own[:, None] & inside)


@kernel()
def _down_kernel(  # type: ignore[no-untyped-def]
    gated, down, ends, out, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    along, inside = tl.arange(0, DEPTH), (columns < WIDTH)[None, :]
    factors = down + expert.to(tl.int64) * (WIDTH * INNER) + columns[None, :] * INNER
    for first in range(start, end, ROWS):
        pairs = first + tl.arange(0, ROWS)
        own = pairs < end
        rows = gated + pairs.to(tl.int64)[:, None] * INNER
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, INNER, DEPTH):
            tile = _load(rows, along[None, :], at, INNER, own[:, None], INNER % DEPTH == 0, "evict_last")
            factor = _load(factors, along[:, None], at, INNER, inside, INNER % DEPTH == 0, "evict_first")
            total = tl.dot(tile, factor, total, input_precision="ieee")
        place = out + pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=own[:, None] & inside)


def choose(logits: Tensor, chosen: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights [T, k] of each token's experts in float32, and their ids [T, k].

    `logits` are [T, experts] in float32. Of equal probabilities, the expert with the smaller number comes first.
    """
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, chosen)
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    _choose_kernel[(tokens,)](
        logits, weights, ids, experts, power_of_two(experts), chosen, normalized, logits.stride(0),
        num_warps=CHOOSE_WARPS,
    )  # fmt: skip
    return weights, ids


def experts_of_few(
    x: Tensor,  # [T, width]
    ids: Tensor,  # [T, k]
    weights: Tensor,  # [T, k] float32
    up: Tensor,  # [experts, 2 * inner, width]: gate and up
    down: Tensor,  # [experts, width, inner]
    activation: str,
    up_tiling: Tiling,
    down_tiling: Tiling,
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts in float32.

    Bytes: the weights of each expert that has tokens, once: 9.4 MB an expert of Qwen3-30B-A3B. At 16 tokens 82 of its
    128 experts have some, and at 64 tokens nearly all: 0.18 and 0.28 ms a layer at the copy rate of an H200.
    """
    check_activation(activation)
    assert up.is_contiguous()
    assert down.is_contiguous()
    (tokens, chosen), (experts, width, inner) = ids.shape, down.shape
    order, place, ends = group(ids, experts)
    gated = x.new_empty(tokens * chosen, inner)
    rows, columns, depth, warps, stages = up_tiling
    _gated_kernel[(-(-inner // columns), experts)](
        x, up, order, ends, gated, x.stride(0), width, inner, chosen, activation, rows, columns, depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    made = x.new_empty(tokens * chosen, width)
    rows, columns, depth, warps, stages = down_tiling
    _down_kernel[(-(-width // columns), experts)](
        gated, down, ends, made, width, inner, rows, columns, depth, num_warps=warps, num_stages=stages
    )
    return combine(made, weights, place, chosen)
