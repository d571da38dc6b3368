"""The work list of a decode step: each item is one chunk of one row's context.

It is made on the device once a step and read by every layer. With `Sharing`, the pages that the rows of a group have in
common come first in each of their lists of items, and the group's leader computes them for all: keys and values that
several rows attend to are read once.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.models.triton_jit import kernel, power_of_two, tl

CHUNKS = (64, 128, 256, 512, 1024, 2048)  # tokens of context an item may have
PROGRAMS_PER_MULTIPROCESSOR = 4  # that have to be resident to keep the memory busy
DIRECT_CONTEXT = 512  # up to here a second launch costs more than the one program of the longest row
MIN_SPARE_ITEMS = 64  # the smallest step in which `max_items` grows

PLAN_ROWS, PLAN_WARPS = 1024, 4


def items_bound(rows: int, total_tokens: int, chunk: int) -> int:
    """Returns a `max_items` that is enough for `rows` contexts of `total_tokens` tokens in chunks of `chunk`.

    It is rounded up to `rows` plus a power of two, so that few values cover all sizes. A row that only pads the batch
    (context 1) counts as a row; its token need not be counted.
    """
    spare = max(total_tokens // chunk, MIN_SPARE_ITEMS)
    return rows + (1 << (spare - 1).bit_length())


def choose_chunk(
    rows: int, total_tokens: int, longest: int, kv_heads: int, multiprocessors: int = 132
) -> tuple[int, int]:
    """Returns `chunk` and `max_items` for one step of `rows` contexts, `total_tokens` in all, the longest `longest`.

    It is the largest chunk that leaves every resident program its share: a tail item then takes no longer than the
    others together. `max_items == rows` means that every row is one item, whatever its context: no plan, no merge. The
    same pair is returned over wide ranges of sizes, because each pair is a captured graph.
    """
    share = total_tokens * kv_heads // (PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    chunk = max((size for size in CHUNKS if size <= share), default=CHUNKS[0])
    if longest <= max(chunk, DIRECT_CONTEXT):
        return CHUNKS[-1], rows
    return chunk, items_bound(rows, total_tokens, chunk)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work list of a step and memory for its partials: allocated once, filled by `plan_items`, read by layers."""

    item_row: Tensor  # [capacity] int32
    item_chunk: Tensor  # [capacity] int32
    first_item: Tensor  # [rows + 1] int32
    partial_out: Tensor  # [capacity, heads, size] float32, not normalized
    partial_stats: Tensor  # [2, capacity, heads] float32: peak of the scores in base 2, sum of the weights

    @classmethod
    def allocate(cls, rows: int, capacity: int, heads: int, size: int, device: torch.device | str) -> DecodePlan:
        """Returns a plan with memory for up to `rows` rows of `capacity` items."""

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


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rows that have the same first pages. The host changes it when rows come and go (`SharedPages`).

    A list of peers stands on its leader, the lowest row of it. Its rows have equal `pages`, and that many equal first
    entries of the table, all before their last token: `pages * PAGE < context`. A row with `pages` above 0 is in
    exactly one list, a row with 0 in none; a group of more rows than a list is wide is several lists.
    """

    pages: Tensor  # [rows] int32
    peers: Tensor  # [rows, width] int32: a leader's list, itself first, then -1; only -1 on every other row


def plan_items(plan: DecodePlan, contexts: Tensor, chunk: int, max_items: int, sharing: Sharing | None = None) -> None:
    """Lists the chunks of all rows: item -> (row, chunk), rows in order, `first_item` the prefix sum of their counts.

    With `sharing`, a row's first items are the chunks of its shared pages, and the others those of the rest. A leader's
    shared items are computed for its peers, whose own return at once. Rows have up to one item more: the bound is that
    of twice the rows.

    Items from `max_items` on are not listed; their rows come out as NaN, so that a violated bound shows. Nothing is
    done if every row is one item. One launch of `rows` programs, each of which reads all contexts: a few microseconds
    up to some thousand rows.
    """
    rows = contexts.shape[0]
    if max_items == rows:
        return
    check_plan(plan, rows, chunk, max_items)
    _plan_kernel[(rows,)](
        contexts, contexts if sharing is None else sharing.pages, plan.item_row, plan.item_chunk, plan.first_item, rows,
        max_items, chunk, BLOCK_ROWS=min(PLAN_ROWS, power_of_two(rows)), BLOCK_ITEMS=64, SHARES=sharing is not None,
        PAGE_SIZE=PAGE, num_warps=PLAN_WARPS,
    )  # fmt: skip


def check_plan(plan: DecodePlan, rows: int, chunk: int, max_items: int) -> None:
    assert chunk in CHUNKS, f"`chunk` is one of {CHUNKS}, not {chunk}"
    assert rows < max_items <= plan.capacity, "`max_items` is the number of rows, or lies above it within the plan"
    assert rows < plan.first_item.shape[0], "the plan was allocated for fewer rows"


@kernel("rows", "max_items", "chunk")
def _plan_kernel(  # type: ignore[no-untyped-def]
    contexts, shared, item_row, item_chunk, first_item, rows, max_items, chunk, BLOCK_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, SHARES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program for each row counts the items of the rows before its own, then lists its own."""
    row = tl.program_id(0)
    before = tl.zeros((BLOCK_ROWS,), tl.int32)
    for at in range(0, row, BLOCK_ROWS):
        other = at + tl.arange(0, BLOCK_ROWS)
        context = tl.load(contexts + other, mask=other < row, other=0).to(tl.int32)
        if SHARES:
            common = tl.load(shared + other, mask=other < row, other=0) * PAGE_SIZE
            before += (common + chunk - 1) // chunk
            context -= common
        before += (context + chunk - 1) // chunk
    first = tl.sum(before, 0)
    own = tl.load(contexts + row).to(tl.int32)
    count = 0
    if SHARES:
        own_common = tl.load(shared + row) * PAGE_SIZE
        count += (own_common + chunk - 1) // chunk
        own -= own_common
    count += (own + chunk - 1) // chunk
    tl.store(first_item + row, first)
    if row == rows - 1:
        tl.store(first_item + rows, first + count)
    for at in range(0, count, BLOCK_ITEMS):
        index = at + tl.arange(0, BLOCK_ITEMS)
        listed = (index < count) & (first + index < max_items)
        tl.store(item_row + first + index, tl.zeros_like(index) + row, mask=listed)
        tl.store(item_chunk + first + index, index, mask=listed)
