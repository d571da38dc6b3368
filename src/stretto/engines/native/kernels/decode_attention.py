"""Attention of decoding rows over the paged cache: one query token a row, contexts of any mix of lengths.

Contexts are long-tailed, so the unit of work is a chunk of a row's context, not a row. Once a step, `plan_items` lists
the chunks of all rows on the device. In every layer, one program for each item and kv head computes an online softmax
over its chunk. A row of one chunk is finished by that program; the chunks of a longer row leave float32 partials that a
second kernel merges in order. Launch grids depend on `rows` and `max_items` alone, and the host reads nothing back. So
a step can be captured in a CUDA graph and replayed while contexts grow, as long as there are at most `max_items`
chunks.

A row's result depends on its own query, keys, values and context and on `chunk`, and not on its neighbours: rows share
no sum, and each sum runs over tiles in order.

Bytes: each program reads 2 * chunk * size * element bytes of the cache once for all heads of its group, in strips of
`size` elements, with 16-byte loads; partials add about 2 * group / chunk of that. The kernel is bound by memory: expect
70 to 85 % of the copy rate if at least `PROGRAMS_PER_MULTIPROCESSOR` programs a multiprocessor have work.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, check_plan
from stretto.models.triton_jit import kernel, power_of_two, tl

TILE_BYTES = 16384  # of keys, and of values, that a program has in a stage of its pipeline
DECODE_WARPS, DECODE_STAGES = 4, 3  # the page numbers take stages too: (stages - 1) // 2 tiles are in flight
MERGE_ITEMS, MERGE_WARPS = 32, 4

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
    if not direct:
        check_plan(plan, rows, chunk, max_items)
    group, block_size = heads // kv_heads, power_of_two(size)
    shares = sharing is not None and not direct
    width = sharing.peers.shape[1] if sharing is not None and shares else 1
    _decode_kernel[(max_items * kv_heads,)](
        q, keys, values, table, contexts, plan.item_row, plan.item_chunk, plan.first_item,
        sharing.pages if sharing is not None else contexts, sharing.peers if sharing is not None else contexts,
        plan.partial_out, plan.partial_stats, out, scale * LOG2_E, rows, max_items, chunk, plan.partial_stats.stride(0),
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], table.stride(0), *out.stride()[:2],
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, SHARES=shares, WIDTH=width,
        BLOCK_M=max(16, power_of_two(width * group)), BLOCK_N=tile_tokens(block_size, keys.element_size()),
        BLOCK_SIZE=block_size, PAGE_SIZE=PAGE, DIRECT=direct, num_warps=DECODE_WARPS, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if not direct:
        _merge_kernel[(rows * heads,)](
            plan.first_item, plan.partial_out, plan.partial_stats, out, max_items, plan.partial_stats.stride(0),
            *out.stride()[:2], HEADS=heads, SIZE=size, BLOCK_SIZE=block_size, BLOCK_ITEMS=MERGE_ITEMS,
            num_warps=MERGE_WARPS,
        )  # fmt: skip
    return out


def tile_tokens(block_size: int, element_size: int) -> int:
    """Returns the tokens of a tile of keys or values: `TILE_BYTES`, within the limits of products and small chunks."""
    return min(max(TILE_BYTES // (block_size * element_size), 16), 128)


def check_operands(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Checks the assumptions of the kernels: one dtype, whole groups, contiguous vectors."""
    assert q.dtype == keys.dtype == values.dtype, "query, keys and values have one dtype"
    assert q.shape[1] % keys.shape[1] == 0, "heads are a multiple of the kv heads"
    assert out.shape == q.shape
    assert all(x.stride(-1) == 1 for x in (q, keys, values, out)), "the elements of a vector are contiguous"


@kernel("rows", "max_items", "chunk")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, table, contexts, item_row, item_chunk, first_item, shared, peers, partial_out, partial_stats, out,
    scale, rows, max_items, chunk, stats_stride, q_row, q_head, key_slot, key_head, value_slot, value_head, table_row,
    out_row, out_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SHARES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """One program for each item and kv head: the heads of a row, or of a list of peers, against one chunk.

    A lane is a head of a row; `scale` is to base 2. Neighbouring programs read neighbouring strips of the cache.
    """
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    lane, column, tile = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + lane % GROUP
    if DIRECT:
        row = item
        context = tl.load(contexts + row).to(tl.int32)
        start, end = 0, context
    else:
        if item >= tl.load(first_item + rows):
            return
        row = tl.load(item_row + item)
        index = tl.load(item_chunk + item)
        context = tl.load(contexts + row).to(tl.int32)
        start = index * chunk
        end = tl.minimum(start + chunk, context)
        alone = context <= chunk  # the row's only item
    lane_row = tl.where(lane < GROUP, row, -1)
    if SHARES:
        common = tl.load(shared + row) * PAGE_SIZE
        before = (common + chunk - 1) // chunk
        in_common = index < before
        if in_common & (tl.load(peers + row * WIDTH) != row):
            return
        listed = tl.load(peers + row * WIDTH + lane // GROUP, mask=in_common & (lane < WIDTH * GROUP), other=-1)
        lane_row = tl.where(in_common, listed, lane_row)
        start = tl.where(in_common, start, common + (index - before) * chunk)
        end = tl.minimum(start + chunk, tl.where(in_common, common, context))
        alone = alone & (common == 0)
    real = (lane_row >= 0)[:, None] & (column < SIZE)[None, :]
    place = lane_row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + column[None, :]
    query = tl.load(q + place, mask=real, other=0.0)
    pages = table + row.to(tl.int64) * table_row
    key_base = keys + kv_head * key_head + column[None, :]
    value_base = values + kv_head * value_head + column[None, :]

    peak, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
    for at in range(start, end, BLOCK_N):
        position = at + tile
        inside = position < end
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

    if DIRECT or alone:
        place = lane_row.to(tl.int64)[:, None] * out_row + head[:, None] * out_head + column[None, :]
        tl.store(out + place, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = tl.zeros_like(lane) + item
        if SHARES:  # each peer has a place of its own for what is computed here
            part = tl.load(first_item + lane_row, mask=lane_row >= 0, other=max_items) + index
        kept = (lane_row >= 0) & (part < max_items)
        line = part * (KV_HEADS * GROUP) + head
        place = line.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(partial_out + place, sums, mask=kept[:, None] & (column < SIZE)[None, :])
        tl.store(partial_stats + line, peak, mask=kept)
        tl.store(partial_stats + stats_stride + line, total, mask=kept)


@kernel("max_items")
def _merge_kernel(  # type: ignore[no-untyped-def]
    first_item, partial_out, partial_stats, out, max_items, stats_stride, out_row, out_head, HEADS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
):  # fmt: skip
    """One program for each row and head merges the partials of its items, in order. Rows of one item are done."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    first = tl.load(first_item + row)
    end = tl.load(first_item + row + 1)
    if (end - first == 1) & (end <= max_items):
        return
    column = tl.arange(0, BLOCK_SIZE)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((BLOCK_SIZE,), tl.float32)
    for at in range(first, tl.minimum(end, max_items), BLOCK_ITEMS):
        item = at + tl.arange(0, BLOCK_ITEMS)
        inside = item < tl.minimum(end, max_items)
        line = item * HEADS + head
        peaks = tl.load(partial_stats + line, mask=inside, other=float("-inf"))
        totals = tl.load(partial_stats + stats_stride + line, mask=inside, other=0.0)
        present = inside[:, None] & (column < SIZE)[None, :]
        outs = tl.load(partial_out + line[:, None].to(tl.int64) * SIZE + column[None, :], mask=present, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(peaks - higher)
        total = total * fade + tl.sum(totals * weights, 0)
        sums = sums * fade + tl.sum(outs * weights[:, None], 0)
        peak = higher
    result = sums / total
    # More items than the bound: NaN is better than attention to a part of the context.
    result = tl.where(end <= max_items, result, float("nan"))
    place = out + row.to(tl.int64) * out_row + head * out_head + column
    tl.store(place, result.to(out.dtype.element_ty), mask=column < SIZE)
