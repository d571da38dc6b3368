"""Attention of decoding rows over the paged cache: one query token a row, contexts of any mix of lengths.

Contexts are long-tailed, so the unit of work is a chunk of a row's context, not a row. Once a step, `plan_items` lists
the chunks of all rows on the device; in every layer, one program an item and kv head makes an online softmax over its
chunk. A row of one chunk is finished by that program; the chunks of a longer row leave float32 partials that a second
kernel merges in order. Launch grids depend on `rows` and `max_items` alone, and the host reads nothing back, so a step
can be captured in a CUDA graph and replayed while contexts grow, as long as their chunks number `max_items` or fewer.

A row's result depends on its own query, keys, values and context and on `chunk`, and not on its neighbours: rows share
no sum, and each sum runs over tiles in order.

Bytes: each program reads 2 * chunk * size * element bytes of the cache once for all heads of its group, in strips of
`size` elements, 16-byte loads; partials add about 2 * group / chunk of that. It is bound by memory: 70 to 85 % of the
copy rate is what to expect when at least `PROGRAMS_PER_MULTIPROCESSOR` programs a multiprocessor have work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError:  # builds of torch for the CPU come without it, and nothing there launches a kernel
        triton = tl = None

CHUNKS = (64, 128, 256, 512, 1024, 2048)  # tokens of context an item
PROGRAMS_PER_MULTIPROCESSOR = 4  # that have to be resident before the memory is kept busy
DIRECT_CONTEXT = 512  # up to here a second launch costs more than the longest row's one program
MIN_SPARE_ITEMS = 64  # the smallest step in which `max_items` grows

TILE_BYTES = 16384  # of keys, and of values, that a program has in a stage of its pipeline
DECODE_WARPS, DECODE_STAGES = 4, 3  # the page numbers take stages too: (stages - 1) // 2 tiles are under way
MERGE_ITEMS, MERGE_WARPS = 32, 4
PLAN_ROWS, PLAN_WARPS = 1024, 4

LOG2_E = 1.4426950408889634


class _Unavailable:
    """Stands for a kernel where triton is not installed."""

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("a kernel was launched, but `triton` is not installed: install it, or run with CPU tensors")


def kernel(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` that does not compile anew for special values of the arguments named; inert without triton."""
    if triton is None:
        return lambda function: _Unavailable()
    return triton.jit(do_not_specialize=list(unspecialized))  # type: ignore[no-any-return]


def items_bound(rows: int, total_tokens: int, chunk: int) -> int:
    """A `max_items` that is enough for `rows` contexts of `total_tokens` tokens in chunks of `chunk`.

    Rounded up to `rows` plus a power of two, so that few values cover all sizes. A row that only fills the batch up
    (context 1) counts as a row; its token need not be counted.
    """
    spare = max(total_tokens // chunk, MIN_SPARE_ITEMS)
    return rows + (1 << (spare - 1).bit_length())


def choose_chunk(
    rows: int, total_tokens: int, longest: int, kv_heads: int, multiprocessors: int = 132
) -> tuple[int, int]:
    """`chunk` and `max_items` for one step of `rows` contexts, `total_tokens` in all, the longest `longest`.

    The largest chunk that still leaves every resident program its share: a tail item then takes no longer than the
    others together. `max_items == rows` says that every row is one item, whatever its context: no plan, no merge. The
    same pair comes back over wide ranges of sizes, because each is a captured graph.
    """
    share = total_tokens * kv_heads // (PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    chunk = max((size for size in CHUNKS if size <= share), default=CHUNKS[0])
    if longest <= max(chunk, DIRECT_CONTEXT):
        return CHUNKS[-1], rows
    return chunk, items_bound(rows, total_tokens, chunk)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work list of a step and room for its partials: allocated once, filled by `plan_items`, read in each layer."""

    item_row: Tensor  # [capacity] int32
    item_chunk: Tensor  # [capacity] int32
    first_item: Tensor  # [rows + 1] int32
    partial_out: Tensor  # [capacity, heads, size] float32, not normalized
    partial_stats: Tensor  # [2, capacity, heads] float32: peak of the scores in base 2, sum of the weights

    @classmethod
    def allocate(cls, rows: int, capacity: int, heads: int, size: int, device: torch.device | str) -> DecodePlan:
        """Room for up to `rows` rows of `capacity` items."""

        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            numbers(capacity),
            numbers(capacity),
            numbers(rows + 1),
            torch.zeros(capacity, heads, size, device=device),
            torch.zeros(2, capacity, heads, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.item_row.shape[0]


def plan_items(plan: DecodePlan, contexts: Tensor, chunk: int, max_items: int) -> None:
    """List the chunks of all rows: item -> (row, chunk), rows in order, `first_item` the prefix sum of their counts.

    Items from `max_items` on are not listed; their rows come out as NaN, so that a broken bound is seen. Nothing is
    done where every row is one item. One launch of `rows` programs, each of which reads all contexts: a few
    microseconds up to some thousand rows.
    """
    rows = contexts.shape[0]
    if max_items == rows:
        return
    _check_plan(plan, rows, chunk, max_items)
    _plan_kernel[(rows,)](
        contexts,
        plan.item_row,
        plan.item_chunk,
        plan.first_item,
        rows,
        max_items,
        chunk,
        BLOCK_ROWS=min(PLAN_ROWS, power_of_two(rows)),
        BLOCK_ITEMS=64,
        num_warps=PLAN_WARPS,
    )


def plan_items_reference(plan: DecodePlan, contexts: Tensor, chunk: int, max_items: int) -> None:
    """What `plan_items` does, in plain torch."""
    rows = contexts.shape[0]
    if max_items == rows:
        return
    _check_plan(plan, rows, chunk, max_items)
    counts = (contexts + chunk - 1) // chunk
    plan.first_item[0] = 0
    plan.first_item[1 : rows + 1] = counts.cumsum(0)
    row = torch.repeat_interleave(torch.arange(rows, device=contexts.device), counts)
    index = torch.arange(row.shape[0], device=contexts.device) - plan.first_item[:-1].long()[row]
    listed = min(max_items, row.shape[0])
    plan.item_row[:listed], plan.item_chunk[:listed] = row[:listed], index[:listed]


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
) -> Tensor:
    """Attention of each row's one token over its context, into `out`.

    `plan` has been filled by `plan_items` with the same contexts, `chunk` and `max_items`; it is not read where
    `max_items == rows`, which is right for any context. Table entries beyond a context are not read.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    check_operands(q, keys, values, out)
    direct = max_items == rows
    if not direct:
        _check_plan(plan, rows, chunk, max_items)
    group, block_size = heads // kv_heads, power_of_two(size)
    _decode_kernel[(max_items * kv_heads,)](
        q,
        keys,
        values,
        table,
        contexts,
        plan.item_row,
        plan.item_chunk,
        plan.first_item,
        plan.partial_out,
        plan.partial_stats,
        out,
        scale * LOG2_E,
        rows,
        chunk,
        plan.partial_stats.stride(0),
        *q.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        table.stride(0),
        *out.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        BLOCK_M=max(16, power_of_two(group)),
        BLOCK_N=tile_tokens(block_size, keys.element_size()),
        BLOCK_SIZE=block_size,
        PAGE_SIZE=PAGE,
        DIRECT=direct,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
    )
    if not direct:
        _merge_kernel[(rows * heads,)](
            contexts,
            plan.first_item,
            plan.partial_out,
            plan.partial_stats,
            out,
            max_items,
            chunk,
            plan.partial_stats.stride(0),
            *out.stride()[:2],
            HEADS=heads,
            SIZE=size,
            BLOCK_SIZE=block_size,
            BLOCK_ITEMS=MERGE_ITEMS,
            num_warps=MERGE_WARPS,
        )
    return out


def paged_decode_reference(
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
) -> Tensor:
    """What `paged_decode` computes, row by row in float32. It needs neither the plan nor the chunk."""
    for row, context in enumerate(contexts.tolist()):
        slots = context_slots(table[row], context)
        out[row] = dense_attention(q[row, None], keys[slots], values[slots], scale)[0].to(out.dtype)
    return out


def context_slots(pages: Tensor, context: int) -> Tensor:
    """The cache slots [context] of the first `context` positions of a row of a table."""
    positions = torch.arange(context, device=pages.device)
    return pages[positions // PAGE].long() * PAGE + positions % PAGE


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention in float32 of the last positions of one sequence: `q` [tokens, heads, size], its keys and
    values [context, kv heads, size]; [tokens, heads, size]."""
    tokens, heads, context = q.shape[0], q.shape[1], keys.shape[0]
    group = heads // keys.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("mhd,nhd->hmn", q.float(), key) * scale
    visible = torch.ones(tokens, context, dtype=torch.bool, device=q.device).tril(context - tokens)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, value)


def tile_tokens(block_size: int, element_size: int) -> int:
    """Tokens of a tile of keys or values: `TILE_BYTES` of them, within what a product and a small chunk can use."""
    return min(max(TILE_BYTES // (block_size * element_size), 16), 128)


def check_operands(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """What the kernels take for granted: one dtype, whole groups, vectors without gaps."""
    assert q.dtype == keys.dtype == values.dtype, "query, keys and values have one dtype"
    assert q.shape[1] % keys.shape[1] == 0, "heads are a multiple of the kv heads"
    assert out.shape == q.shape
    assert all(x.stride(-1) == 1 for x in (q, keys, values, out)), "the elements of a vector lie side by side"


def _check_plan(plan: DecodePlan, rows: int, chunk: int, max_items: int) -> None:
    assert chunk in CHUNKS, f"`chunk` is one of {CHUNKS}, not {chunk}"
    assert rows < max_items <= plan.capacity, "`max_items` is the number of rows, or lies above it within the plan"
    assert rows < plan.first_item.shape[0], "the plan was allocated for fewer rows"


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@kernel("rows", "max_items", "chunk")
def _plan_kernel(  # type: ignore[no-untyped-def]
    contexts,
    item_row,
    item_chunk,
    first_item,
    rows,
    max_items,
    chunk,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_ITEMS: tl.constexpr,  # noqa: N803
):
    """One program a row: it counts the items of the rows before its own, then lists its own."""
    row = tl.program_id(0)
    before = tl.zeros((BLOCK_ROWS,), tl.int32)
    for at in range(0, row, BLOCK_ROWS):
        other = at + tl.arange(0, BLOCK_ROWS)
        context = tl.load(contexts + other, mask=other < row, other=0).to(tl.int32)
        before += (context + chunk - 1) // chunk
    first = tl.sum(before, 0)
    count = (tl.load(contexts + row).to(tl.int32) + chunk - 1) // chunk
    tl.store(first_item + row, first)
    if row == rows - 1:
        tl.store(first_item + rows, first + count)
    for at in range(0, count, BLOCK_ITEMS):
        index = at + tl.arange(0, BLOCK_ITEMS)
        listed = (index < count) & (first + index < max_items)
        tl.store(item_row + first + index, tl.zeros_like(index) + row, mask=listed)
        tl.store(item_chunk + first + index, index, mask=listed)


@kernel("rows", "chunk")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    table,
    contexts,
    item_row,
    item_chunk,
    first_item,
    partial_out,
    partial_stats,
    out,
    scale,  # to base 2
    rows,
    chunk,
    stats_stride,
    q_row,
    q_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    table_row,
    out_row,
    out_head,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    DIRECT: tl.constexpr,  # noqa: N803
):
    """One program an item and kv head: the heads of its group against one chunk of one row's context.

    Programs of neighbouring kv heads are neighbours, because their strips of the cache are.
    """
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if DIRECT:
        row = item
        context = tl.load(contexts + row).to(tl.int32)
        start, end = 0, context
    else:
        if item >= tl.load(first_item + rows):
            return
        row = tl.load(item_row + item)
        context = tl.load(contexts + row).to(tl.int32)
        start = tl.load(item_chunk + item) * chunk
        end = tl.minimum(start + chunk, context)

    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_SIZE)
    tile = tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (column < SIZE)[None, :]
    query = tl.load(q + row.to(tl.int64) * q_row + head[:, None] * q_head + column[None, :], mask=real, other=0.0)
    pages = table + row.to(tl.int64) * table_row
    key_base = keys + kv_head * key_head + column[None, :]
    value_base = values + kv_head * value_head + column[None, :]

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
    for at in range(start, end, BLOCK_N):
        position = at + tile
        inside = position < end
        entry = at // PAGE_SIZE + tl.arange(0, BLOCK_N // PAGE_SIZE)
        page = tl.load(pages + entry, mask=entry * PAGE_SIZE < end, other=0).to(tl.int64)
        slot = tl.reshape(page[:, None] * PAGE_SIZE + tl.arange(0, PAGE_SIZE)[None, :], (BLOCK_N,))
        # What lies beyond the context is not read: it costs bytes, and a weight of zero times NaN is NaN.
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

    # A row of one chunk is whole.
    if DIRECT or context <= chunk:
        place = out + row.to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
        tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        line = item * (KV_HEADS * GROUP) + head
        tl.store(partial_out + line[:, None].to(tl.int64) * SIZE + column[None, :], sums, mask=real)
        tl.store(partial_stats + line, peak, mask=member < GROUP)
        tl.store(partial_stats + stats_stride + line, total, mask=member < GROUP)


@kernel("max_items", "chunk")
def _merge_kernel(  # type: ignore[no-untyped-def]
    contexts,
    first_item,
    partial_out,
    partial_stats,
    out,
    max_items,
    chunk,
    stats_stride,
    out_row,
    out_head,
    HEADS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_ITEMS: tl.constexpr,  # noqa: N803
):
    """One program a row and head: the partials of its items, in order. Rows of one item are done already."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    first = tl.load(first_item + row)
    end = tl.load(first_item + row + 1)
    context = tl.load(contexts + row).to(tl.int32)
    if context <= chunk and end <= max_items:
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
    # More items than the bound: say so, rather than attend to a part of the context.
    result = tl.where(end <= max_items, result, float("nan"))
    place = out + row.to(tl.int64) * out_row + head * out_head + column
    tl.store(place, result.to(out.dtype.element_ty), mask=column < SIZE)
