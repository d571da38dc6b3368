"""Decodes of fixed sizes: one token for every row, drawn on the device, captured as graphs.

The state of the rows advances on the device, so that a step needs nothing from the host but its launch. Batches are
padded to one of a few sizes with rows that are free.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import PAGE, KVCache
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.device_memory import to_device
from stretto.engines.native.graph_cache import Graphs
from stretto.engines.native.kernels.decode_work_list import (
    CHUNKS,
    DecodePlan,
    Sharing,
    choose_chunk,
    items_bound,
)
from stretto.engines.native.kernels.kernel_set import PagedKernels
from stretto.engines.native.kernels.token_draw import draw_workspace
from stretto.engines.native.rows import (
    CONTEXT,
    LIVE,
    MADE,
    MIN_P,
    SEED,
    SLOT,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    Rows,
)
from stretto.engines.native.sampling import Truncation, sample, uniforms
from stretto.engines.native.versions import Slots
from stretto.models.triton_jit import power_of_two

SIZES = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048,
    2560, 3072, 4096, 5120, 6144, 8192,
)  # fmt: skip
# Reading common pages once is a launch more in each layer. It is worth it if it saves this share of the context, and as
# many bytes of a layer's cache as an H200 reads in the time of that launch (7 us at 64 rows).
SHARED_SHARE, SHARED_BYTES = 0.2, 24 << 20
FIXED_CHUNK = 256  # tokens of context an item has if results must not depend on neighbours


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """The memory that the decode of one tree has to itself, so that the decodes of several trees may overlap."""

    plan: DecodePlan
    workspace: Tensor  # of `draw`
    index: Tensor  # [rows + 1] int64: the rows that run, if not all do
    stream: torch.cuda.Stream | None  # used if there are several trees


@dataclass(frozen=True, slots=True)
class Shape:
    """The constants of a captured decode of one tree."""

    size: int  # rows
    chunk: int  # tokens of context an item of attention has
    items: int  # bound of the items
    lines: int  # numbers that a draw gives each row
    shares: bool  # pages that rows have in common are read once


class Decodes:
    """Launches one token for every row, in one batch or one a tree."""

    def __init__(
        self,
        slots: Slots,
        decoders: Sequence[Decoder],  # one a tree
        cache: KVCache,
        rows: Rows,
        heads: int,
        kernels: PagedKernels,
        graphs: Graphs,
        *,
        deterministic: bool,
    ) -> None:
        self._slots, self._decoders, self._cache, self._rows = slots, decoders, cache, rows
        self._kernels, self._graphs, self._deterministic = kernels, graphs, deterministic
        device, size = rows.device, rows.capacity + 1
        self._multiprocessors = 132
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # Products choose their kernel by the number of rows: if results must not depend on neighbours, it is fixed.
        smaller = set() if deterministic else {s for s in SIZES if s < rows.capacity}
        self._sizes = sorted(smaller | {rows.capacity})
        largest = FIXED_CHUNK if deterministic else CHUNKS[-1]
        items = 2 * size + max(2048, 4 * cache.num_pages * PAGE // largest)
        self._memory = [
            TreeMemory(
                DecodePlan.allocate(size, items, heads, cache.head_size, device),
                draw_workspace(size, decoder.vocabulary, device),
                torch.full((size,), rows.capacity, dtype=torch.int64, device=device),
                torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
            )
            for decoder in decoders
        ]
        self._drawn = torch.zeros(2, size, dtype=torch.int32, device=device)  # see `Pending`

    def size_of(self, rows: int) -> int:
        """Returns the size of the batch that holds rows 0 .. rows-1."""
        return next(size for size in self._sizes if size >= rows)

    def shrinks(self) -> bool:
        """True if the rows would run in a smaller batch after `Rows.compact`."""
        return self.size_of(len(self._rows)) < self.size_of(int(self._rows.numbers()[-1]) + 1)

    def wait(self) -> None:
        """Waits until nothing runs on the streams of the trees."""
        for memory in self._memory:
            if memory.stream is not None:
                memory.stream.synchronize()

    def lines(self, numbers: NDArray[np.int64]) -> int:
        """Returns how many numbers a draw gives each of these rows: two, and the support if any is truncated."""
        rows = self._rows
        if not rows.truncates[numbers].any():
            return 2
        width = power_of_two(max(1, int(rows.width[numbers].max())))
        return 3 + min(width, *(decoder.vocabulary for decoder in self._decoders))

    def launch(self, observed: list[Tensor] | None) -> Tensor:
        """Launches one token for every row; returns what is drawn, [lines, rows + 1], see `Pending`.

        With `observed` nothing is captured, and the logits of the rows are appended there.
        """
        rows = self._rows
        rows.upload()
        numbers = rows.numbers()
        lines = self.lines(numbers)
        if lines > len(self._drawn):
            self._graphs.retire()  # what was captured, and what is launched, writes to the smaller one
            self._drawn = self._drawn.new_zeros(lines, self._drawn.shape[1])
        if self._slots.one_tree:
            self._launch_tree(0, numbers, None, observed)
        else:
            self._launch_trees(numbers, observed)
        return self._drawn[:lines]

    def _launch_trees(self, numbers: NDArray[np.int64], observed: list[Tensor] | None) -> None:
        """Launches each tree on a stream of its own: small batches leave room for one another."""
        rows = self._rows
        device = rows.device
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        for slot in np.unique(rows.slot[numbers]).tolist():
            own, memory = numbers[rows.slot[numbers] == slot], self._memory[slot]
            index = np.full(self.size_of(len(own)), rows.capacity, dtype=np.int64)
            index[: len(own)] = own
            chosen = memory.index[: len(index)]
            chosen.copy_(to_device(index, device))
            if main is None or memory.stream is None:
                self._launch_tree(slot, own, chosen, observed)
                continue
            memory.stream.wait_stream(main)
            with torch.cuda.stream(memory.stream):
                self._launch_tree(slot, own, chosen, observed)
        if main is not None:
            for memory in self._memory:
                if memory.stream is not None:
                    main.wait_stream(memory.stream)

    def _launch_tree(
        self, tree: int, numbers: NDArray[np.int64], index: Tensor | None, observed: list[Tensor] | None
    ) -> None:
        """Launches the rows `numbers` of one tree: rows 0 .. size-1, or those of `index`."""
        shape = self._shape_of(numbers, everyone=index is None)
        if shape.items > self._memory[tree].plan.capacity:
            self._widen(tree, shape.items)
        if observed is not None:
            logits = self._body(tree, shape, index)
            place = numbers if index is None else np.arange(len(numbers))
            observed.append(logits.index_select(0, to_device(place, self._rows.device)))
            return
        self._graphs.run(
            (tree, shape, self._decoders[tree].scale),
            lambda: self._body(tree, shape, index),
            tree,
            lambda: self._restoring(shape.size, index),
        )

    def _shape_of(self, numbers: NDArray[np.int64], *, everyone: bool) -> Shape:
        rows = self._rows
        size = self.size_of(int(numbers[-1]) + 1 if everyone else len(numbers))
        contexts, lines = rows.context[numbers], self.lines(numbers)
        total = int(contexts.sum())
        if self._deterministic:
            return Shape(size, FIXED_CHUNK, items_bound(size, total, FIXED_CHUNK), lines, shares=False)
        saved = 0 if rows.shared is None else rows.shared.saved
        saved_bytes = saved * self._cache.bytes_per_token // self._cache.layers
        shares = everyone and saved >= SHARED_SHARE * total and saved_bytes >= SHARED_BYTES
        longest = sys.maxsize if shares else int(contexts.max())  # what is shared is an item of its own in any case
        chunk, items = choose_chunk(size, total, longest, self._cache.kv_heads, self._multiprocessors)
        return Shape(size, chunk, items_bound(2 * size, total, chunk) if shares else items, lines, shares)

    @contextmanager
    def _restoring(self, size: int, index: Tensor | None) -> Iterator[None]:
        """Takes back the changes to rows 0 .. size-1, or to those of `index`; other rows may run beside them."""
        ints = self._rows.ints
        own = torch.arange(size, device=ints.device) if index is None else index
        saved = ints.index_select(1, own)
        try:
            yield
        finally:
            ints.index_copy_(1, own, saved)

    def _widen(self, tree: int, items: int) -> None:
        """Makes room for more items: pages that rows share count once in the cache, and once a row in attention."""
        old = self._memory[tree].plan
        self._graphs.retire()
        rows, (heads, size) = old.first_item.shape[0] - 1, old.partial_out.shape[1:]
        plan = DecodePlan.allocate(rows, power_of_two(items), heads, size, self._rows.device)
        self._memory[tree] = replace(self._memory[tree], plan=plan)

    def _body(self, tree: int, shape: Shape, index: Tensor | None) -> Tensor:
        """Decodes rows 0 .. size-1, or those of `index`; their state on the device advances by one token."""
        rows, cache, kernels, size = self._rows, self._cache, self._kernels, shape.size
        plan, outputs = self._memory[tree].plan, self._drawn[: shape.lines]
        if index is None:
            ints, floats = rows.ints[:, :size], rows.floats[:, :size]
            table, drawn = rows.table[:size], outputs[:, :size]
        else:
            ints, floats = rows.ints.index_select(1, index), rows.floats.index_select(1, index)
            table, drawn = rows.table.index_select(0, index), outputs.index_select(1, index)
        contexts = ints[CONTEXT]
        positions = contexts - 1
        page = table.gather(1, (positions // PAGE)[:, None])[:, 0]
        writes = page * PAGE + positions % PAGE
        sharing = None
        if shape.shares and rows.shared is not None:
            sharing = Sharing(rows.shared.sharing.pages[:size], rows.shared.sharing.peers[:size])
        kernels.plan_items(plan, contexts, shape.chunk, shape.items, sharing)

        def attend(layer: int, q: Tensor, out: Tensor, scale: float) -> Tensor:
            keys, values = cache.of_layer[layer]
            kernels.paged_decode(q, keys, values, table, contexts, plan, shape.chunk, shape.items, scale, out, sharing)
            return out

        logits = self._decoders[tree](ints[TOKEN], positions, writes, ints[SLOT], attend, None)
        self.draw(logits, ints, floats, drawn, tree)
        if index is not None:
            rows.ints.index_copy_(1, index, ints)
            outputs.index_copy_(1, index, drawn)
        return logits

    def draw(self, logits: Tensor, ints: Tensor, floats: Tensor, drawn: Tensor, tree: int = 0) -> None:
        """Draws a token a row into `drawn` [lines, rows], and advances the rows' state `ints`; see `Pending`."""
        count = logits.shape[0]
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
        workspace = self._memory[tree].workspace
        self._kernels.draw(logits, floats[TEMPERATURE], ints[SEED], ints[MADE], tokens, logprobs, workspace)
        if len(drawn) > 2:
            uniform = uniforms(ints[SEED], ints[MADE])
            truncation = Truncation(ints[TOP_K], floats[TOP_P], floats[MIN_P])
            cut, cut_logprobs, left = sample(logits, uniform, floats[TEMPERATURE], truncation, any_greedy=True)
            assert left is not None
            # The two round differently: a row that is not truncated, or greedy, draws as it does beside none that is.
            uses = truncation.uses & (floats[TEMPERATURE] > 0)
            tokens, logprobs = torch.where(uses, cut, tokens), torch.where(uses, cut_logprobs, logprobs)
            drawn[2].copy_(left.counts)
            drawn[3:].copy_(left.order[:, : len(drawn) - 3].t())
        drawn[0].copy_(tokens)
        drawn[1].copy_(logprobs.view(torch.int32))
        ints[TOKEN].copy_(tokens)
        ints[CONTEXT].add_(ints[LIVE])
        ints[MADE].add_(ints[LIVE])
