"""Draws of tokens from logits on a device, as `sampling.sample` defines them for rows that do not truncate.

It takes one pass over the logits and a second look at one block of each row. The first kernel stores the maximum and
the sum of exponentials of each block of columns; the second merges them, finds the block in which the cumulative mass
passes the row's uniform number, and in it the token. Masses are summed in float64. The logits are multiplied by the
reciprocal of the temperature, so a log-probability differs from that of `sample` in the last bits; at temperature 1
nothing is rounded.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

import torch
from torch import Tensor

from stretto.models.triton_jit import kernel, tl

# To be tuned on a device. A thread of the first kernel holds BLOCK / (32 * REDUCE_WARPS) logits at once.
BLOCK = 4096
REDUCE_WARPS = 4
PICK_WARPS = 8


@kernel()
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """Returns the number of `sampling.uniforms` for one row, bit for bit."""
    z = seed.to(tl.uint64) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@kernel()
def _reciprocal(temperature):  # type: ignore[no-untyped-def]
    """Returns the factor of the logits: 1 for a greedy row."""
    return tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0))


@kernel()
def _reduce_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, maxima, sums, STRIDE: tl.constexpr, VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    factor = _reciprocal(tl.load(temperature + row).to(tl.float32))
    value = tl.load(logits + row * STRIDE + columns, mask=columns < VOCABULARY, other=-float("inf"))
    value = value.to(tl.float32) * factor
    largest = tl.max(value, 0)
    # A block of nothing but -inf has no mass; without the guard its sum would be NaN.
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    tl.store(maxima + row * BLOCKS + block, largest)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp(value - shift), 0))


@kernel()
def _pick_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, seeds, positions, maxima, sums, tokens, logprobs, STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own_temperature = tl.load(temperature + row).to(tl.float32)
    factor = _reciprocal(own_temperature)
    greedy = own_temperature <= 0.0
    # Find the block that the draw falls into.
    blocks = tl.arange(0, BLOCKS_PADDED)
    largest = tl.load(maxima + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=-float("inf"))
    part = tl.load(sums + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0)
    top = tl.max(largest, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    # A NaN reaches the sum of its block, and from there the total, even if the maximum ignores it.
    mass = part.to(tl.float64) * tl.exp(largest - shift).to(tl.float64)
    total = tl.sum(mass, 0)
    valid = (total > 0.0) & (total < float("inf"))
    threshold = _uniform(tl.load(seeds + row), tl.load(positions + row)) * total
    reached = tl.where(greedy, largest == top, (tl.cumsum(mass, 0) > threshold) & (mass > 0.0))
    last = tl.max(tl.where(mass > 0.0, blocks, 0), 0)  # if rounding left nothing above the threshold
    block = tl.minimum(tl.min(tl.where(reached, blocks, BLOCKS_PADDED), 0), last)
    # Find the place in the block; its mass is summed again here, so the draw's share of it carries over.
    before = tl.sum(tl.where(blocks < block, mass, 0.0), 0)
    own = tl.sum(tl.where(blocks == block, mass, 0.0), 0)
    peak = tl.load(maxima + row * BLOCKS + block)
    places = tl.arange(0, BLOCK)
    columns = block * BLOCK + places
    value = tl.load(logits + row * STRIDE + columns, mask=columns < VOCABULARY, other=-float("inf"))
    value = value.to(tl.float32) * factor
    weight = tl.exp(value - peak)
    cumulative = tl.cumsum(weight.to(tl.float64), 0)
    share = (threshold - before) / own * tl.sum(weight.to(tl.float64), 0)
    reached = tl.where(greedy, value == peak, (cumulative > share) & (weight > 0.0))
    last = tl.max(tl.where(weight > 0.0, places, 0), 0)
    place = tl.minimum(tl.min(tl.where(reached, places, BLOCK), 0), last)
    token = tl.where(valid, block * BLOCK + place, 0)
    drawn = tl.load(logits + row * STRIDE + token).to(tl.float32) * factor
    logprob = (drawn - top) - tl.log(total.to(tl.float32))
    logprob = tl.where(greedy, 0.0, logprob)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(valid, logprob, float("nan")))


def draw_workspace(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Returns the memory that `draw` needs for up to `rows` rows: [2, rows, blocks] float32."""
    return torch.empty(2, rows, -(-vocabulary // BLOCK), dtype=torch.float32, device=device)


def draw(
    logits: Tensor,  # [rows, vocabulary], rows contiguous
    temperature: Tensor,  # [rows]; 0: greedy, the first of the largest
    mixed_seeds: Tensor,  # [rows] int64, of `sampling.mix_seed`
    positions: Tensor,  # [rows] int64: the index of the token drawn, as in `sampling.uniforms`
    tokens_out: Tensor,  # [rows] int64
    logprobs_out: Tensor,  # [rows] float32
    workspace: Tensor,  # of `draw_workspace`, for at least as many rows
) -> None:
    """Draws a token for each row, with its log-probability under softmax(logits / temperature).

    A greedy token has log-probability 0. A row without a distribution (a NaN, +inf, nothing but -inf) gives NaN and
    token 0. A token of zero probability is never drawn. Bytes: the logits once, and 4 KB a row; 78 MB at 256 rows of a
    vocabulary of 151,936 in bfloat16, about 20 us at the bandwidth of a copy, and 5 us for the second kernel.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // BLOCK)
    assert workspace.shape[1] >= rows, "`workspace` is for fewer rows than `logits` has"
    assert workspace.shape[2] == blocks, "`workspace` is for another vocabulary than that of `logits`"
    maxima, sums = workspace[0], workspace[1]
    _reduce_kernel[(blocks, rows)](
        logits, temperature, maxima, sums, logits.stride(0), vocabulary, blocks, BLOCK, num_warps=REDUCE_WARPS
    )
    _pick_kernel[(rows,)](
        logits, temperature, mixed_seeds, positions, maxima, sums, tokens_out, logprobs_out, logits.stride(0),
        vocabulary, blocks, 1 << (blocks - 1).bit_length(), BLOCK, num_warps=PICK_WARPS,
    )  # fmt: skip
