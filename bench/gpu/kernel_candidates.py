"""Other ways to write the kernels of a decode step, to be measured against those of the product.

Each function has the arguments of the product's function that it would replace, and its constants as one more argument.
It computes the same to rounding. `bench.gpu.kernel_variants` times them. Nothing here is used by the product.

The second LoRA product has two ways, `Tiling.way`:

- `all`: a token's h of *all* slots is loaded with a mask that leaves zeros for the other slots, and multiplied by the
  `b` of all slots. There is no branch, so the loads of `b` are in flight together. h is selected, so no NaN in another
  slot's h reaches a token. But `b` of every slot is multiplied, by zero, so `b` **must be finite in every slot**: a
  version with weights that are not would have to be refused when it is loaded.
- `range`: a loop from the smallest to the largest slot of the tile, without a branch in it. Each product is selected by
  the tokens of that slot, so nothing of another slot reaches a token, whatever is in its `b`.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels import decode_attention, layers
from stretto.engines.native.kernels.decode_attention import LOG2_E, check_operands
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, check_plan
from stretto.engines.native.kernels.layers import _add_norm_kernel, activate
from stretto.models.triton_jit import kernel, power_of_two, tl

MOST_SPLITS = 32  # programs that compute the common pages of one list, for each kv head


class Tiling(NamedTuple):
    """The constants of a kernel that adds adapters."""

    way: str  # of the second product: `all` or `range`
    tile: int  # tokens of a program
    columns: int  # of the output, of a program
    depth: int  # rows of `b` of one step of `all`
    warps: int
    stages: int


class Merging(NamedTuple):
    """The constants of a merge."""

    heads: int  # of a program
    items: int  # whose loads are in flight together
    warps: int


class Attending(NamedTuple):
    """The constants of one of the two launches of attention."""

    tokens: int  # of a tile of keys or values
    warps: int
    stages: int


# -- adapters ----------------------------------------------------------------------------------------------------------


@kernel()
def _adapters(  # type: ignore[no-untyped-def]
    h, b, columns, other_h, other_b, other_columns, slots, inside_rows, inside_columns, B_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
    ALL: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns two products `h_own @ b_own` [TILE, COLUMNS] of the same tokens in float32, computed in one loop.

    `h` [TILE] points at each token's column of the first slot. The second product is zero if `other_b` is None.
    """
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    other_total = tl.zeros((TILE, COLUMNS), tl.float32)
    slots = tl.where(inside_rows, slots, NUM_SLOTS).to(tl.int32)
    if ALL:
        for at in tl.range(0, NUM_SLOTS * RANK, DEPTH, num_stages=STAGES):
            line = at + tl.arange(0, DEPTH)
            mine = (line // RANK)[None, :] == slots[:, None]
            mine = mine & (line < NUM_SLOTS * RANK)[None, :]
            present = (line < NUM_SLOTS * RANK)[:, None] & inside_columns[None, :]
            own = tl.load(h[:, None] + line[None, :], mask=mine, other=0.0).to(b.dtype.element_ty)
            factor = tl.load(b + line[:, None] * B_STRIDE + columns[None, :], mask=present, other=0.0)
            total = tl.dot(own, factor, total, input_precision="ieee")
            if other_b is not None:
                own = tl.load(other_h[:, None] + line[None, :], mask=mine, other=0.0).to(b.dtype.element_ty)
                factor = other_b + line[:, None] * OTHER_STRIDE + other_columns[None, :]
                factor = tl.load(factor, mask=present, other=0.0)
                other_total = tl.dot(own, factor, other_total, input_precision="ieee")
    else:
        ranks = tl.arange(0, RANK_PADDED)
        mine = inside_rows[:, None] & (ranks < RANK)[None, :]
        place = slots[:, None] * RANK + ranks[None, :]
        own = tl.load(h[:, None] + place, mask=mine, other=0.0).to(b.dtype.element_ty)
        other_own = own
        if other_b is not None:
            other_own = tl.load(other_h[:, None] + place, mask=mine, other=0.0).to(b.dtype.element_ty)
        present = (ranks < RANK)[:, None] & inside_columns[None, :]
        smallest = tl.min(slots, 0)
        largest = tl.max(tl.where(inside_rows, slots, -1), 0)
        for slot in tl.range(smallest, largest + 1, num_stages=STAGES):
            line = (slot * RANK + ranks)[:, None]
            factor = tl.load(b + line * B_STRIDE + columns[None, :], mask=present, other=0.0)
            product = tl.dot(own, factor, input_precision="ieee")
            total = tl.where((slots == slot)[:, None], product, total)
            if other_b is not None:
                factor = tl.load(other_b + line * OTHER_STRIDE + other_columns[None, :], mask=present, other=0.0)
                product = tl.dot(other_own, factor, input_precision="ieee")
                other_total = tl.where((slots == slot)[:, None], product, other_total)
    return total, other_total


@kernel("tokens")
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up, slots, b_gate, b_up, out, tokens, scale, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each tile of tokens and columns: the adapters of gate and up in one loop."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, whole = rows < tokens, columns < WIDTH
    inside = own[:, None] & whole[None, :]
    start = gate_up + rows.to(tl.int64) * STRIDE
    slot = tl.load(slots + rows, mask=own, other=0)
    gate = tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0)
    up = tl.load(start[:, None] + WIDTH + columns[None, :], mask=inside, other=0.0)
    h = start + 2 * WIDTH
    of_gate, of_up = _adapters(h, b_gate, columns, h + NUM_SLOTS * RANK, b_up, columns, slot, own, whole, GATE_STRIDE,
                               UP_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, ALL, TILE, COLUMNS, DEPTH,
                               STAGES)  # fmt: skip
    active = activate(gate.to(tl.float32) + scale * of_gate, ACTIVATION)
    place = out + rows.to(tl.int64)[:, None] * OUT_STRIDE + columns[None, :]
    tl.store(place, (active * (up.to(tl.float32) + scale * of_up)).to(out.dtype.element_ty), mask=inside)


def gate(
    gate_up: Tensor,
    width: int,
    activation: str,
    slots: Tensor,
    bs: tuple[Tensor | None, Tensor | None] | None,
    rank: int,
    scale: float,
    out: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """Computes `layers.gate`. Layers of which one has no adapters go to the product's kernel."""
    b_gate, b_up = bs or (None, None)
    if b_gate is None or b_up is None:
        return layers.gate(gate_up, width, activation, slots, bs, rank, scale, out)
    layers.check_activation(activation)
    tokens = gate_up.shape[0]
    out = gate_up.new_empty(tokens, width) if out is None else out
    _gate_kernel[(_blocks(tokens, tiling.tile), _blocks(width, tiling.columns))](
        gate_up, slots, b_gate, b_up, out, tokens, scale, gate_up.stride(0), out.stride(0), width, activation,
        b_gate.stride(0), b_up.stride(0), b_gate.shape[0] // rank, rank, power_of_two(rank, 16), tiling.way == "all",
        tiling.tile, tiling.columns, tiling.depth, tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return out


@kernel("tokens")
def _add_kernel(  # type: ignore[no-untyped-def]
    stream, added, slots, b, tokens, scale, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr, HIDDEN: tl.constexpr,
    B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ALL: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each tile of tokens and columns adds the adapters to the stream."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, whole = rows < tokens, columns < HIDDEN
    inside = own[:, None] & whole[None, :]
    slot = tl.load(slots + rows, mask=own, other=0)
    place = stream + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    value = tl.load(place, mask=inside, other=0.0)
    h = added + rows.to(tl.int64) * ADDED_STRIDE + HIDDEN
    adapted, _ = _adapters(h, b, columns, h, None, columns, slot, own, whole, B_STRIDE, 0, NUM_SLOTS, RANK,
                           RANK_PADDED, ALL, TILE, COLUMNS, DEPTH, STAGES)  # fmt: skip
    tl.store(place, value + scale * adapted, mask=inside)


@kernel("tokens")
def _fused_norm_kernel(  # type: ignore[no-untyped-def]
    stream, added, weight, slots, b, out, tokens, epsilon, scale, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each tile of tokens holds their whole rows: adapters, sum and norm in one launch."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    own, whole = rows < tokens, columns < HIDDEN
    inside = own[:, None] & whole[None, :]
    slot = tl.load(slots + rows, mask=own, other=0)
    start = added + rows.to(tl.int64) * ADDED_STRIDE
    value, _ = _adapters(start + HIDDEN, b, columns, start, None, columns, slot, own, whole, B_STRIDE, 0, NUM_SLOTS,
                         RANK, RANK_PADDED, ALL, TILE, BLOCK, DEPTH, STAGES)  # fmt: skip
    place = stream + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    value *= scale
    value += tl.load(place, mask=inside, other=0.0)
    value += tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(place, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / HIDDEN + epsilon)
    value = value * inverse[:, None] * tl.load(weight + columns, mask=whole, other=0.0).to(tl.float32)[None, :]
    place = out + rows.to(tl.int64)[:, None] * OUT_STRIDE + columns[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


def add_norm(
    stream: Tensor,
    added: Tensor | None,
    weight: Tensor,
    epsilon: float,
    slots: Tensor,
    b: Tensor | None,
    rank: int,
    scale: float,
    out: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """Computes `layers.add_norm`: adapters by tiles, then the norm row by row; `columns` 0: both in one launch.

    Without adapters the product's kernel runs.
    """
    if added is None or b is None:
        return layers.add_norm(stream, added, weight, epsilon, slots, b, rank, scale, out)
    tokens, hidden = stream.shape
    out = torch.empty_like(stream, dtype=weight.dtype) if out is None else out
    num_slots, padded, block = b.shape[0] // rank, power_of_two(rank, 16), power_of_two(hidden)
    every = tiling.way == "all"
    if not tiling.columns:
        _fused_norm_kernel[(_blocks(tokens, tiling.tile),)](
            stream, added, weight, slots, b, out, tokens, epsilon, scale, stream.stride(0), added.stride(0),
            out.stride(0), hidden, b.stride(0), num_slots, rank, padded, every, tiling.tile, max(block, 16),
            tiling.depth, tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
        return out
    _add_kernel[(_blocks(tokens, tiling.tile), _blocks(hidden, tiling.columns))](
        stream, added, slots, b, tokens, scale, stream.stride(0), added.stride(0), hidden, b.stride(0), num_slots, rank,
        padded, every, tiling.tile, tiling.columns, tiling.depth, tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    chunk = min(layers.NORM_CHUNK, power_of_two(rank))
    _add_norm_kernel[(tokens,)](
        stream, added, weight, slots, None, out, epsilon, scale, stream.stride(0), added.stride(0), out.stride(0),
        hidden, 0, rank, chunk, block, num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return out


@kernel()
def _head(  # type: ignore[no-untyped-def]
    start, h, b, slots, own, head, weight, cos_sin, position, place, epsilon, scale, ROTATED: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, SIZE: tl.constexpr, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes one head of the tokens of a tile; the adapters of its two halves are one loop."""
    halves = tl.arange(0, HALF_PADDED)
    whole = halves < SIZE // 2
    inside = own[:, None] & whole[None, :]
    columns = head * SIZE + halves
    first = tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start[:, None] + columns[None, :] + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    of_first, of_second = _adapters(h, b, columns, h, b, columns + SIZE // 2, slots, own, whole, B_STRIDE, B_STRIDE,
                                    NUM_SLOTS, RANK, RANK_PADDED, ALL, TILE, HALF_PADDED, DEPTH,
                                    STAGES)  # fmt: skip
    first += scale * of_first
    second += scale * of_second
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(squares / SIZE + epsilon)[:, None]
        of_first = tl.load(weight + halves, mask=whole, other=0.0).to(tl.float32)
        of_second = tl.load(weight + SIZE // 2 + halves, mask=whole, other=0.0).to(tl.float32)
        first = first * inverse * of_first[None, :]
        second = second * inverse * of_second[None, :]
    place = place[:, None] + halves[None, :]
    if ROTATED:
        angle = cos_sin + position[:, None] * TABLE_STRIDE + halves[None, :]
        cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angle + SIZE, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (first * cos - second * sin).to(place.dtype.element_ty), mask=inside)
        cos = tl.load(angle + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angle + SIZE + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
        tl.store(place + SIZE // 2, (second * cos + first * sin).to(place.dtype.element_ty), mask=inside)
    else:
        tl.store(place, first.to(place.dtype.element_ty), mask=inside)
        tl.store(place + SIZE // 2, second.to(place.dtype.element_ty), mask=inside)


@kernel("tokens")
def _split_heads_kernel(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos_sin, positions, slots, b_q, b_k, b_v, write_slots, keys, values, q_out, tokens,
    epsilon, scale, STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, Q_HEAD: tl.constexpr, K_STRIDE: tl.constexpr,
    K_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr, BQ_STRIDE: tl.constexpr,
    BK_STRIDE: tl.constexpr, BV_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each head of a tile of tokens."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = rows < tokens
    rows = rows.to(tl.int64)
    q_start = qkv + rows * STRIDE
    k_start = q_start + HEADS * SIZE
    v_start = k_start + KV_HEADS * SIZE
    h = v_start + KV_HEADS * SIZE
    slot = tl.load(slots + rows, mask=own, other=0)
    position = tl.load(positions + rows, mask=own, other=0)
    target = tl.load(write_slots + rows, mask=own, other=0)
    if head < HEADS:
        place = q_out + rows * Q_STRIDE + head * Q_HEAD
        _head(q_start, h, b_q, slot, own, head, q_weight, cos_sin, position, place, epsilon, scale, True, TABLE_STRIDE,
              SIZE, BQ_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, ALL, TILE, HALF_PADDED, DEPTH, STAGES)  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        h += NUM_SLOTS * RANK
        place = keys + target.to(tl.int64) * K_STRIDE + head * K_HEAD
        _head(k_start, h, b_k, slot, own, head, k_weight, cos_sin, position, place, epsilon, scale, True, TABLE_STRIDE,
              SIZE, BK_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, ALL, TILE, HALF_PADDED, DEPTH, STAGES)  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        h += 2 * NUM_SLOTS * RANK
        place = values + target.to(tl.int64) * V_STRIDE + head * V_HEAD
        _head(v_start, h, b_v, slot, own, head, None, cos_sin, position, place, epsilon, scale, False, TABLE_STRIDE,
              SIZE, BV_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, ALL, TILE, HALF_PADDED, DEPTH, STAGES)  # fmt: skip


def split_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    size: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    bs: tuple[Tensor | None, Tensor | None, Tensor | None] | None,
    rank: int,
    scale: float,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_out: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """Computes `layers.split_heads`; `columns` is not read. A layer without adapters: the product's kernel."""
    b_q, b_k, b_v = bs or (None, None, None)
    if b_q is None or b_k is None or b_v is None:
        return layers.split_heads(qkv, heads, kv_heads, size, q_weight, k_weight, epsilon, cos_sin, positions, slots,
                                  bs, rank, scale, write_slots, keys, values, q_out)  # fmt: skip
    tokens = qkv.shape[0]
    q_out = qkv.new_empty(tokens, heads, size) if q_out is None else q_out
    _split_heads_kernel[(_blocks(tokens, tiling.tile), heads + 2 * kv_heads)](
        qkv, q_weight, k_weight, cos_sin, positions, slots, b_q, b_k, b_v, write_slots, keys, values, q_out, tokens,
        epsilon, scale, qkv.stride(0), heads, kv_heads, size, cos_sin.stride(0), q_out.stride(0), q_out.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), b_q.stride(0), b_k.stride(0), b_v.stride(0),
        b_q.shape[0] // rank, rank, power_of_two(rank, 16), tiling.way == "all", tiling.tile,
        power_of_two(size // 2, 16), tiling.depth, tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return q_out


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


# -- attention ---------------------------------------------------------------------------------------------------------


@kernel("max_items", "chunk")
def _merge_kernel(  # type: ignore[no-untyped-def]
    first_item, contexts, shared, partial_out, partial_stats, out, max_items, chunk, stats_stride, out_row, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, ITEMS: tl.constexpr,
    FINISHED: tl.constexpr, SHARES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program for each row and some heads merges the partials of its items, in order.

    Rows of one item are done; with `FINISHED`, so are rows of one item of their own after what they share.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    first = tl.load(first_item + row)
    end = tl.load(first_item + row + 1)
    done = end - first == 1
    if FINISHED:
        rest = tl.load(contexts + row).to(tl.int32)
        if SHARES:
            rest -= tl.load(shared + row) * PAGE_SIZE
        done = rest <= chunk
    if done & (end <= max_items):
        return
    column = tl.arange(0, BLOCK_SIZE)
    whole = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    peak = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, BLOCK_SIZE), tl.float32)
    stop = tl.minimum(end, max_items)
    for at in range(first, stop, ITEMS):
        for step in tl.static_range(ITEMS):
            item = at + step
            line = item * HEADS + head
            inside = (head < HEADS) & (item < stop)
            # Heads that do not exist have a peak too: no difference of infinities.
            peaks = tl.load(partial_stats + line, mask=inside, other=float("-inf"))
            peaks = tl.where(head < HEADS, peaks, 0.0)
            totals = tl.load(partial_stats + stats_stride + line, mask=inside, other=0.0)
            place = partial_out + line.to(tl.int64)[:, None] * SIZE + column[None, :]
            outs = tl.load(place, mask=whole & (item < stop), other=0.0)
            higher = tl.maximum(peak, peaks)
            fade = tl.exp2(peak - higher)
            weight = tl.exp2(peaks - higher)
            total = total * fade + totals * weight
            sums = sums * fade[:, None] + outs * weight[:, None]
            peak = higher
    result = sums / total[:, None]
    # More items than the bound: NaN is better than attention to a part of the context.
    result = tl.where(end <= max_items, result, float("nan"))
    place = out + row.to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=whole)


@kernel()
def _attend(  # type: ignore[no-untyped-def]
    query, key_base, value_base, pages, start, end, scale, peak, total, sums, key_slot, value_slot, SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continues an online softmax over the positions from `start` to `end`; the positions of a tile fill pages."""
    column, tile = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_N)
    for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        inside = at + tile < end
        entry = at // PAGE_SIZE + tl.arange(0, BLOCK_N // PAGE_SIZE)
        page = tl.load(pages + entry, mask=entry * PAGE_SIZE < end, other=0).to(tl.int64)
        slot = tl.reshape(page[:, None] * PAGE_SIZE + tl.arange(0, PAGE_SIZE)[None, :], (BLOCK_N,))
        present = inside[:, None] & (column < SIZE)[None, :]
        key = tl.load(key_base + slot[:, None] * key_slot, mask=present, other=0.0)
        value = tl.load(value_base + slot[:, None] * value_slot, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision="ieee")
        peak = higher
    return peak, total, sums


@kernel("max_items", "chunk", "splits")
def _shared_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, table, first_item, shared, peers, partial_out, partial_stats, scale, max_items, chunk, splits,
    stats_stride, q_row, q_head, key_slot, key_head, value_slot, value_head, table_row, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some programs for each row and kv head; those of a leader compute the chunks of its list's common pages.

    A program of another row returns after one load, which waits for no other.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    row = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    if tl.load(peers + row * WIDTH) != row:
        return
    common = tl.load(shared + row) * PAGE_SIZE
    lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_SIZE)
    head = kv_head * GROUP + lane % GROUP
    lane_row = tl.load(peers + row * WIDTH + lane // GROUP, mask=lane < WIDTH * GROUP, other=-1)
    there = lane_row >= 0
    first = tl.load(first_item + lane_row, mask=there, other=max_items)
    real = there[:, None] & (column < SIZE)[None, :]
    place = lane_row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + column[None, :]
    query = tl.load(q + place, mask=real, other=0.0)
    pages = table + row.to(tl.int64) * table_row
    key_base = keys + kv_head * key_head + column[None, :]
    value_base = values + kv_head * value_head + column[None, :]
    for index in range(split, (common + chunk - 1) // chunk, splits):
        start = index * chunk
        peak, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
        peak, total, sums = _attend(query, key_base, value_base, pages, start, tl.minimum(start + chunk, common), scale,
                                    peak, total, sums, key_slot, value_slot, SIZE, BLOCK_N, BLOCK_SIZE, PAGE_SIZE,
                                    STAGES)  # fmt: skip
        kept = there & (first + index < max_items)
        line = (first + index) * (KV_HEADS * GROUP) + head
        place = line.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(partial_out + place, sums, mask=kept[:, None] & (column < SIZE)[None, :])
        tl.store(partial_stats + line, peak, mask=kept)
        tl.store(partial_stats + stats_stride + line, total, mask=kept)


@kernel("rows", "chunk")
def _own_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, table, contexts, item_row, item_chunk, first_item, shared, partial_out, partial_stats, out, scale,
    rows, chunk, stats_stride, q_row, q_head, key_slot, key_head, value_slot, value_head, table_row, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SHARES: tl.constexpr, FINISH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each item and kv head that no peer computes: the heads of one row against one chunk.

    With `FINISH`, a row of one such item starts from the partials of its common pages, and so is finished here.
    """
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    listed = tl.load(first_item + rows)
    row = tl.load(item_row + item)
    index = tl.load(item_chunk + item)
    if item >= listed:
        return
    context = tl.load(contexts + row).to(tl.int32)
    before, common = 0, 0
    if SHARES:
        common = tl.load(shared + row) * PAGE_SIZE
        before = (common + chunk - 1) // chunk
        if index < before:
            return
    start = common + (index - before) * chunk
    end = tl.minimum(start + chunk, context)
    lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_SIZE)
    head = kv_head * GROUP + lane
    there = lane < GROUP
    real = there[:, None] & (column < SIZE)[None, :]
    query = q + row.to(tl.int64) * q_row + head[:, None] * q_head + column[None, :]
    query = tl.load(query, mask=real, other=0.0)
    peak, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
    if FINISH:
        finished = context - common <= chunk
        for earlier in range(item - index, tl.where(finished, item, item - index)):
            line = earlier * (KV_HEADS * GROUP) + head
            peaks = tl.load(partial_stats + line, mask=there, other=0.0)
            totals = tl.load(partial_stats + stats_stride + line, mask=there, other=0.0)
            place = partial_out + line.to(tl.int64)[:, None] * SIZE + column[None, :]
            outs = tl.load(place, mask=real, other=0.0)
            higher = tl.maximum(peak, peaks)
            fade = tl.exp2(peak - higher)
            weight = tl.exp2(peaks - higher)
            total = total * fade + totals * weight
            sums = sums * fade[:, None] + outs * weight[:, None]
            peak = higher
    else:
        finished = (context <= chunk) & (common == 0)
    pages = table + row.to(tl.int64) * table_row
    peak, total, sums = _attend(query, keys + kv_head * key_head + column[None, :],
                                values + kv_head * value_head + column[None, :], pages, start, end, scale, peak, total,
                                sums, key_slot, value_slot, SIZE, BLOCK_N, BLOCK_SIZE, PAGE_SIZE, STAGES)  # fmt: skip
    if finished:
        target = out + row.to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
        tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = item * (KV_HEADS * GROUP) + head
        tl.store(partial_out + part.to(tl.int64)[:, None] * SIZE + column[None, :], sums, mask=real)
        tl.store(partial_stats + part, peak, mask=there)
        tl.store(partial_stats + stats_stride + part, total, mask=there)


def merge(
    plan: DecodePlan,
    contexts: Tensor,
    chunk: int,
    max_items: int,
    out: Tensor,
    sharing: Sharing | None,
    merging: Merging,
    finished: bool = False,
) -> Tensor:
    """Merges the partials of rows of several items into `out`, as the last launch of `paged_decode` does.

    `finished`: rows of one item of their own are done already.
    """
    rows, heads, size = out.shape
    _merge_kernel[(rows, _blocks(heads, merging.heads))](
        plan.first_item, contexts, contexts if sharing is None else sharing.pages, plan.partial_out, plan.partial_stats,
        out, max_items, chunk, plan.partial_stats.stride(0), *out.stride()[:2], HEADS=heads, SIZE=size,
        BLOCK_SIZE=power_of_two(size), BLOCK_HEADS=merging.heads, ITEMS=merging.items, FINISHED=finished,
        SHARES=sharing is not None, PAGE_SIZE=PAGE, num_warps=merging.warps,
    )  # fmt: skip
    return out


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    contexts: Tensor,
    plan: DecodePlan,
    chunk: int,
    max_items: int,
    scale: float,
    out: Tensor,
    sharing: Sharing | None,
    common: Attending,
    own: Attending,
    merging: Merging,
    finish: bool,
) -> Tensor:
    """Computes `decode_attention.paged_decode` in two launches and a merge.

    The first launch has a block of queries for all peers, the second one for a single row, so that more of its programs
    are resident. `finish`: the second launch also merges the rows that have one item of their own. If every row is one
    item, the product's kernel runs.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    if max_items == rows:
        return decode_attention.paged_decode(q, keys, values, table, contexts, plan, chunk, max_items, scale, out)
    check_operands(q, keys, values, out)
    check_plan(plan, rows, chunk, max_items)
    group, block_size = heads // kv_heads, power_of_two(size)
    strides = (*q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], table.stride(0))
    if sharing is not None:
        width = sharing.peers.shape[1]
        splits = max(1, min(max_items // (2 * rows), MOST_SPLITS))  # chunks of a row, if all have as many
        _shared_kernel[(rows * kv_heads, splits)](
            q, keys, values, table, plan.first_item, sharing.pages, sharing.peers, plan.partial_out, plan.partial_stats,
            scale * LOG2_E, max_items, chunk, splits, plan.partial_stats.stride(0), *strides, KV_HEADS=kv_heads,
            GROUP=group, SIZE=size, WIDTH=width, BLOCK_M=max(16, power_of_two(width * group)), BLOCK_N=common.tokens,
            BLOCK_SIZE=block_size, PAGE_SIZE=PAGE, STAGES=common.stages, num_warps=common.warps,
        )  # fmt: skip
    _own_kernel[(max_items * kv_heads,)](
        q, keys, values, table, contexts, plan.item_row, plan.item_chunk, plan.first_item,
        contexts if sharing is None else sharing.pages, plan.partial_out, plan.partial_stats, out, scale * LOG2_E, rows,
        chunk, plan.partial_stats.stride(0), *strides, *out.stride()[:2], KV_HEADS=kv_heads, GROUP=group, SIZE=size,
        SHARES=sharing is not None, FINISH=finish, BLOCK_M=max(16, power_of_two(group)), BLOCK_N=own.tokens,
        BLOCK_SIZE=block_size, PAGE_SIZE=PAGE, STAGES=own.stages, num_warps=own.warps,
    )  # fmt: skip
    return merge(plan, contexts, chunk, max_items, out, sharing, merging, finish)
