"""Attention of decoding rows over the paged cache: one query token a row, contexts of any mix of lengths.

Contexts are long-tailed, so the unit of work is a chunk of a row's context, not a row. Once a step, `plan_items` lists
the chunks of all rows on the device. A layer has up to three launches:

1. With `Sharing`: the chunks of the pages that several rows have in common, for all of them at once.
2. One program for each other item and kv head computes an online softmax over its chunk. If that is the only chunk of
   the row's own, the program starts from the partials of the common pages and finishes the row.
3. The chunks of longer rows leave float32 partials, which are merged in order.

The first launch has a block of queries for all peers, the second one for a single row: more of its programs are
resident. Launch grids depend on `rows` and `max_items` alone, and the host reads nothing back. So a step can be
captured in a CUDA graph and replayed while contexts grow, as long as there are at most `max_items` chunks.

A row's result depends on its own query, keys, values and context, on `chunk`, on how many pages it shares and on
whether `max_items == rows`, and not on its neighbours: rows share no sum, and each sum runs over tiles in order.

Bytes: each program reads 2 * chunk * size * element bytes of the cache once for all heads of its group, in strips of
`size` elements, with 16-byte loads. Measured on an H200 at 512 and 1,536 rows of a 0.5B model: 3.5 and 2.1 times the
time of the bytes.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, check_plan
from stretto.models.triton_jit import kernel, power_of_two, tl

# Measured on an H200 (`bench/results/gpu/kernel_variants`). Page numbers take stages too: (stages - 1) // 2 tiles are
# in flight.
TILE_BYTES, DIRECT_WARPS, DIRECT_STAGES = 16384, 4, 3  # of a row that is one item whatever its context
SHARED_TOKENS, SHARED_WARPS = 32, 4  # of common pages
SHARED_STAGES = ((8192, 5), (TILE_BYTES, 3))  # tiles of up to so many bytes: so many. 99 KB of shared memory must do
OWN_TOKENS, OWN_STAGES = 16, 5  # of every other item
OWN_WARP_ELEMENTS = 2048  # of the sums of a program, for each warp
MOST_SPLITS = 32  # programs of the common pages of one list, for each kv head
MERGE_HEADS, MERGE_ITEMS, MERGE_WARPS = 8, 2, 2  # with common pages: many rows of few items
LONG_MERGE_HEADS, LONG_MERGE_ITEMS, LONG_MERGE_WARPS = 1, 8, 1  # without them: rows may have many items

LOG2_E = 1.4426950408889634


def paged_decode(
    q: Tensor,  # [rows, heads, size]
    keys: Tensor,  # [slots, kv heads, size]
    values: Tensor,
    table: Tensor,  # [rows, pages] int32
    contexts: Tensor,  # [rows] int32 or int64, at least 1
    plan: DecodePlan,
    chunk: int,
    max_items: int,
    scale: float,
    out: Tensor,  # [rows, heads, size]
    sharing: Sharing | None = None,
) -> Tensor:
    """Computes the attention of each row's one token over its context, into `out`.

    `plan` has been filled by `plan_items` with the same contexts, `chunk`, `max_items` and `sharing`. It is not read if
    `max_items == rows`, which is valid for any context. Table entries beyond a context are not read.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    check_operands(q, keys, values, out)
    direct = max_items == rows
    if direct:
        sharing = None
    else:
        check_plan(plan, rows, chunk, max_items)
    pages = contexts if sharing is None else sharing.pages
    group, block_size, stats_stride = heads // kv_heads, power_of_two(size), plan.partial_stats.stride(0)
    strides = (*q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], table.stride(0))
    if sharing is not None:
        width = sharing.peers.shape[1]
        splits = max(1, min(max_items // (2 * rows), MOST_SPLITS))  # chunks of a row, if all have as many
        tokens, stages = shared_tile(block_size, keys.element_size())
        _shared_kernel[(rows * kv_heads, splits)](
            q, keys, values, table, plan.first_item, pages, sharing.peers, plan.partial_out, plan.partial_stats,
            scale * LOG2_E, max_items, chunk, splits, stats_stride, *strides, KV_HEADS=kv_heads, GROUP=group, SIZE=size,
            WIDTH=width, BLOCK_M=max(16, power_of_two(width * group)), BLOCK_N=tokens, BLOCK_SIZE=block_size,
            PAGE_SIZE=PAGE, STAGES=stages, num_warps=SHARED_WARPS,
        )  # fmt: skip
    block_m = max(16, power_of_two(group))
    tokens, warps, stages = OWN_TOKENS, max(1, min(block_m * block_size // OWN_WARP_ELEMENTS, 4)), OWN_STAGES
    if direct:
        tokens, warps, stages = tile_tokens(block_size, keys.element_size()), DIRECT_WARPS, DIRECT_STAGES
    _own_kernel[(max_items * kv_heads,)](
        q, keys, values, table, contexts, plan.item_row, plan.item_chunk, plan.first_item, pages, plan.partial_out,
        plan.partial_stats, out, scale * LOG2_E, rows, chunk, stats_stride, *strides, *out.stride()[:2],
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, SHARES=sharing is not None, DIRECT=direct, BLOCK_M=block_m,
        BLOCK_N=tokens, BLOCK_SIZE=block_size, PAGE_SIZE=PAGE, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if not direct:
        merged, items, warps = LONG_MERGE_HEADS, LONG_MERGE_ITEMS, LONG_MERGE_WARPS
        if sharing is not None:
            merged, items, warps = MERGE_HEADS, MERGE_ITEMS, MERGE_WARPS
        _merge_kernel[(rows, -(-heads // merged))](
            plan.first_item, contexts, pages, plan.partial_out, plan.partial_stats, out, max_items, chunk, stats_stride,
            *out.stride()[:2], HEADS=heads, SIZE=size, BLOCK_SIZE=block_size, BLOCK_HEADS=merged, ITEMS=items,
            SHARES=sharing is not None, PAGE_SIZE=PAGE, num_warps=warps,
        )  # fmt: skip
    return out


def tile_tokens(block_size: int, element_size: int) -> int:
    """Returns the tokens of a tile of keys or values: `TILE_BYTES`, within the limits of products and small chunks."""
    return min(max(TILE_BYTES // (block_size * element_size), 16), 128)


def shared_tile(block_size: int, element_size: int) -> tuple[int, int]:
    """Returns the tokens of a tile of common pages, and the stages of its pipeline."""
    tokens = min(tile_tokens(block_size, element_size), SHARED_TOKENS)
    size = tokens * block_size * element_size
    return tokens, next((stages for most, stages in SHARED_STAGES if size <= most), 1)


def check_operands(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Checks the assumptions of the kernels: one dtype, whole groups, contiguous vectors."""
    assert q.dtype == keys.dtype == values.dtype, "query, keys and values have one dtype"
    assert q.shape[1] % keys.shape[1] == 0, "heads are a multiple of the kv heads"
    assert out.shape == q.shape
    assert all(x.stride(-1) == 1 for x in (q, keys, values, out)), "the elements of a vector are contiguous"


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
        # Positions beyond the context are not read: they cost bytes, and a weight of zero times NaN is NaN.
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

    A lane is a head of a peer; `scale` is to base 2. Each peer has a place of its own for what is computed here. A
    program of another row returns after one load, which waits for no other.
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
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SHARES: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each item and kv head that is not of common pages: the heads of one row against one chunk.

    Neighbouring programs read neighbouring strips of the cache. A row of one such item starts from the partials of its
    common pages, and so is finished here.
    """
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_SIZE)
    head = kv_head * GROUP + lane
    there = lane < GROUP
    real = there[:, None] & (column < SIZE)[None, :]
    peak, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
    if DIRECT:
        row = item
        start = 0
        end = tl.load(contexts + row).to(tl.int32)
    else:
        listed = tl.load(first_item + rows)
        row = tl.load(item_row + item)  # loaded together with `listed`, not after it
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
        finished = context - common <= chunk
        if SHARES:
            for earlier in range(item - index, tl.where(finished, item, item - index)):
                line = earlier * (KV_HEADS * GROUP) + head
                peaks = tl.load(partial_stats + line, mask=there, other=0.0)
                totals = tl.load(partial_stats + stats_stride + line, mask=there, other=0.0)
                place = partial_out + line.to(tl.int64)[:, None] * SIZE + column[None, :]
                outs = tl.load(place, mask=real, other=0.0)
                peak, total, sums = _merged(peak, total, sums, peaks, totals, outs)
    query = q + row.to(tl.int64) * q_row + head[:, None] * q_head + column[None, :]
    query = tl.load(query, mask=real, other=0.0)
    pages = table + row.to(tl.int64) * table_row
    peak, total, sums = _attend(query, keys + kv_head * key_head + column[None, :],
                                values + kv_head * value_head + column[None, :], pages, start, end, scale, peak, total,
                                sums, key_slot, value_slot, SIZE, BLOCK_N, BLOCK_SIZE, PAGE_SIZE, STAGES)  # fmt: skip
    if DIRECT or finished:
        target = out + row.to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
        tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = item * (KV_HEADS * GROUP) + head
        tl.store(partial_out + part.to(tl.int64)[:, None] * SIZE + column[None, :], sums, mask=real)
        tl.store(partial_stats + part, peak, mask=there)
        tl.store(partial_stats + stats_stride + part, total, mask=there)


@kernel()
def _merged(peak, total, sums, peaks, totals, outs):  # type: ignore[no-untyped-def]
    """Returns the softmax over two parts of a context, from that of each."""
    higher = tl.maximum(peak, peaks)
    fade, weight = tl.exp2(peak - higher), tl.exp2(peaks - higher)
    return higher, total * fade + totals * weight, sums * fade[:, None] + outs * weight[:, None]


@kernel("max_items", "chunk")
def _merge_kernel(  # type: ignore[no-untyped-def]
    first_item, contexts, shared, partial_out, partial_stats, out, max_items, chunk, stats_stride, out_row, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, ITEMS: tl.constexpr,
    SHARES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program for each row and some heads merges the partials of its items, in order.

    Rows of one item of their own are done. The loads of `ITEMS` items are in flight together.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    first = tl.load(first_item + row)
    end = tl.load(first_item + row + 1)
    rest = tl.load(contexts + row).to(tl.int32)
    if SHARES:
        rest -= tl.load(shared + row) * PAGE_SIZE
    if (rest <= chunk) & (end <= max_items):
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
            peak, total, sums = _merged(peak, total, sums, peaks, totals, outs)
    result = sums / total[:, None]
    # More items than the bound: NaN is better than attention to a part of the context.
    result = tl.where(end <= max_items, result, float("nan"))
    place = out + row.to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=whole)
