"""Steps of an engine on a device: captured as graphs, drawn on the device, the host one launch behind.

A step launches: what is to be prefilled, the first draw of trajectories whose prompt is done, one decode of all rows;
then it takes in the results of the step *before*. So the device has the next launch queued while the host looks at
stop tokens, and a row that has ended is decoded once more than it needed, into its own pages; that token is never seen.

| waits                  | for                          | until                                      |
|------------------------|------------------------------|--------------------------------------------|
| the host, in `step`    | the results of the last step | its copy has arrived: one step at most     |
| the host, in `flush`   | everything launched          | a row must leave whole: suspend, preempt   |
| the device             | the host                     | only where a step is shorter than a launch |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.attention import Chunk
from stretto.engines.native.cache import PAGE, KVCache
from stretto.engines.native.device_rows import (
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
    DeviceRows,
    Pending,
    to_device,
)
from stretto.engines.native.fused import FusedDecoder
from stretto.engines.native.graphs import Graphs
from stretto.engines.native.kernels.choice import Kernels
from stretto.engines.native.kernels.draw import draw_workspace
from stretto.engines.native.kernels.plan import (
    CHUNKS,
    DecodePlan,
    Sharing,
    choose_chunk,
    items_bound,
    power_of_two,
)
from stretto.engines.native.prefill import Prefills
from stretto.engines.native.sampling import Truncation, sample, uniforms
from stretto.engines.native.schedule import Schedule
from stretto.engines.native.stock import StockDecoder
from stretto.engines.native.trajectory import Ended, Prefix, Trajectory
from stretto.engines.native.versions import Slots

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
SHARED_SHARE = 0.2  # of the context: where rows have so much in common, it is worth reading once
FIXED_CHUNK = 256  # tokens of context an item has where results must not depend on neighbours


@dataclass(frozen=True, slots=True)
class Lane:
    """What the decode of one tree has to itself, so that the decodes of several trees may overlap."""

    plan: DecodePlan
    workspace: Tensor  # of `draw`
    index: Tensor  # [rows + 1] int64: the rows that run, where not all do
    stream: torch.cuda.Stream | None  # used where there are several lanes


class LateSteps:
    """Launches steps over `rows` and takes their results in. One thread calls everything, on one stream."""

    def __init__(
        self,
        slots: Slots,
        decoders: Sequence[FusedDecoder | StockDecoder],  # one a tree
        cache: KVCache,
        rows: DeviceRows,
        schedule: Schedule,
        heads: int,
        kernels: Kernels,
        ends_in_string: Callable[[Trajectory, NDArray[np.int32]], bool],
        *,
        deterministic: bool = False,
    ) -> None:
        self._deterministic = deterministic
        self._slots, self._cache, self._rows, self._schedule = slots, cache, rows, schedule
        self._kernels, self._ends_in_string = kernels, ends_in_string
        device = rows.device
        self._decoders = decoders
        self._graphed = device.type == "cuda"
        self._multiprocessors = 132
        if self._graphed:
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._graphs = Graphs(self.wait, captures=self._graphed)
        size = rows.capacity + 1
        # Products choose their kernel by the number of rows: where results must not depend on neighbours, it is fixed.
        smaller = set() if deterministic else {s for s in SIZES if s < rows.capacity}
        self._sizes = sorted(smaller | {rows.capacity})
        largest = FIXED_CHUNK if deterministic else CHUNKS[-1]
        items = 2 * size + max(2048, 4 * cache.num_pages * PAGE // largest)
        self._lanes = [
            Lane(
                DecodePlan.allocate(size, items, heads, cache.head_size, device),
                draw_workspace(size, decoder.vocabulary, device),
                torch.full((size,), rows.capacity, dtype=torch.int64, device=device),
                torch.cuda.Stream(device, priority=-1) if self._graphed else None,  # type: ignore[no-untyped-call]
            )
            for decoder in decoders
        ]
        pages = rows.table.shape[1]
        self._prefills = Prefills(decoders, cache, kernels, self._graphs, pages, device, deterministic=deterministic)
        self._drawn = torch.zeros(2, size, dtype=torch.int32, device=device)  # see `Pending`
        self._pending: list[Pending] = []
        self.tokens = 0
        self._ended: list[Ended] = []
        self.observed: list[Tensor] | None = None  # logits, for the check at construction

    # -- the step ------------------------------------------------------------------------------------------------------

    def run(self) -> list[Ended]:
        """Launch one token for every running row; what is found to have ended."""
        schedule, rows = self._schedule, self._rows
        before = len(self._pending)
        chunks = schedule.chunks()
        if chunks:
            self._prefill(chunks)
        self._first_draws(schedule.ready())
        lacking = len(rows.lacking())
        schedule.reclaim(lacking)
        if lacking > self._cache.num_free:
            before = self._collect(0)  # a row leaves with all that it has made
        schedule.provide()
        if not schedule.queue and not schedule.num_waiting and not rows.dense() and self._shrinks():
            before = self._collect(0)
            rows.compact()
        if len(rows):
            self._decode()
        launched = len(self._pending) - before
        self._collect(launched)
        ended, self._ended = self._ended, []
        return ended

    def flush(self) -> list[Ended]:
        """Take in everything launched; what has ended."""
        self._collect(0)
        ended, self._ended = self._ended, []
        return ended

    def forget(self) -> None:
        """Drop what was captured: the memory that it points at is about to go."""
        self._graphs.forget()

    def wait(self) -> None:
        """Wait until nothing launched runs any more: what it reads and writes may go afterwards."""
        if self._graphed:
            torch.cuda.current_stream(self._rows.device).synchronize()
            for lane in self._lanes:
                if lane.stream is not None:
                    lane.stream.synchronize()

    def _shrinks(self) -> bool:
        rows = self._rows
        return self._size_of(len(rows)) < self._size_of(int(rows.numbers()[-1]) + 1)

    def _collect(self, keep: int) -> int:
        """Take in the results of all launches but the last `keep`; how many are left."""
        rows = self._rows
        while len(self._pending) > keep:
            count, ending = rows.record(self._pending.pop(0))
            self.tokens += count
            for row, finish, broken in ending:
                trajectory = rows.at(row)
                may_end = rows.strings[row] and finish != "stop" and not broken
                if may_end and self._ends_in_string(trajectory, rows.output(row)[0]):
                    finish = "stop"
                if finish is None:
                    continue
                rows.save(trajectory)
                rows.remove([row])
                self._schedule.end(trajectory, broken=broken)
                self._ended.append((trajectory, finish, broken))
        return len(self._pending)

    def _size_of(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[tuple[Prefix, Chunk]]) -> None:
        for tree in range(len(self._decoders)):
            own = [c for c in chunks if self._slots.mixed or c[1].weights_slot == tree]
            for together in [[c] for c in own] if self._deterministic else [own]:
                if together:
                    self._prefills.run(tree, together, captured=self.observed is None)

    def _first_draws(self, prefixes: Sequence[Prefix]) -> None:
        """Turn those who wait for finished prefixes into rows, and draw the next token of each."""
        if not prefixes:
            return
        starting: list[Trajectory] = []
        place: list[int] = []
        logits = []
        for i, prefix in enumerate(prefixes):
            assert prefix.logits is not None
            logits.append(prefix.logits)
            place += [i] * len(prefix.waiting)
            starting += prefix.waiting
        self._schedule.fork(prefixes)
        rows, device = self._rows, self._rows.device
        rows.upload()
        numbers = np.array([t.row for t in starting], dtype=np.int64)
        index = to_device(numbers, device)
        chosen = torch.stack(logits).index_select(0, to_device(np.array(place, dtype=np.int64), device))
        if self.observed is not None:
            self.observed.append(chosen.clone())
        ints, floats = rows.ints.index_select(1, index), rows.floats.index_select(1, index)
        count = len(starting)
        drawn = torch.empty(self._lines(numbers), count, dtype=torch.int32, device=device)
        # Sums over a vocabulary are split by the number of rows: where it must not matter, each is drawn alone.
        for own in [slice(i, i + 1) for i in range(count)] if self._deterministic else [slice(count)]:
            self._draw(chosen[own], ints[:, own], floats[:, own], drawn[:, own], self._lanes[0].workspace)
        rows.ints.index_copy_(1, index, ints)
        self._expect(numbers, drawn, np.arange(count))

    # -- decode --------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Launch one token for every row, in one batch or one a tree."""
        rows = self._rows
        rows.upload()
        numbers = rows.numbers()
        lines = self._lines(numbers)
        if lines > len(self._drawn):
            self._graphs.retire()  # what was captured, and what is launched, writes to the smaller one
            self._drawn = self._drawn.new_zeros(lines, self._drawn.shape[1])
        if self._slots.mixed:
            self._launch(0, numbers, None)
        else:
            self._decode_apart(numbers)
        self._expect(numbers, self._drawn[:lines], numbers)

    def _lines(self, numbers: NDArray[np.int64]) -> int:
        """How many numbers a draw of these rows gives each: two, and where any is truncated, its support."""
        rows = self._rows
        if not rows.truncates[numbers].any():
            return 2
        width = power_of_two(max(1, int(rows.width[numbers].max())))
        return 3 + min(width, *(decoder.vocabulary for decoder in self._decoders))

    def _decode_apart(self, numbers: NDArray[np.int64]) -> None:
        """One launch a tree, each on a stream of its own: small batches leave room for one another."""
        rows = self._rows
        device = rows.device
        main = torch.cuda.current_stream(device) if self._graphed else None
        for slot in np.unique(rows.slot[numbers]).tolist():
            own, lane = numbers[rows.slot[numbers] == slot], self._lanes[slot]
            index = np.full(self._size_of(len(own)), rows.capacity, dtype=np.int64)
            index[: len(own)] = own
            chosen = lane.index[: len(index)]
            chosen.copy_(to_device(index, device))
            if main is None or lane.stream is None:
                self._launch(slot, own, chosen)
                continue
            lane.stream.wait_stream(main)
            with torch.cuda.stream(lane.stream):
                self._launch(slot, own, chosen)
        if main is not None:
            for lane in self._lanes:
                if lane.stream is not None:
                    main.wait_stream(lane.stream)

    def _launch(self, tree: int, numbers: NDArray[np.int64], index: Tensor | None) -> None:
        rows = self._rows
        size = self._size_of(int(numbers[-1]) + 1 if index is None else len(numbers))
        contexts = rows.context[numbers]
        total = int(contexts.sum())
        shares = index is None and rows.saved >= SHARED_SHARE * total and not self._deterministic
        longest = sys.maxsize if shares else int(contexts.max())  # what is shared is an item of its own in any case
        chunk, items = choose_chunk(size, total, longest, self._cache.kv_heads, self._multiprocessors)
        if self._deterministic:
            chunk, items = FIXED_CHUNK, items_bound(size, total, FIXED_CHUNK)
        elif shares:
            items = items_bound(2 * size, total, chunk)
        if items > self._lanes[tree].plan.capacity:
            self._widen(tree, items)
        lines = self._lines(numbers)
        key = (tree, size, chunk, items, lines, shares, self._decoders[tree].scale)
        if not self._graphed or self.observed is not None:
            logits = self._body(tree, size, chunk, items, lines, shares, index)
            if self.observed is not None:
                place = numbers if index is None else np.arange(len(numbers))
                self.observed.append(logits.index_select(0, to_device(place, rows.device)))
            return
        self._graphs.run(
            key,
            lambda: self._body(tree, size, chunk, items, lines, shares, index),
            tree,
            lambda: self._unmoved(size, index),
        )

    @contextmanager
    def _unmoved(self, size: int, index: Tensor | None) -> Iterator[None]:
        """Rows 0 .. size-1, or those of `index`, are afterwards as they were; others may run beside them."""
        ints = self._rows.ints
        own = torch.arange(size, device=ints.device) if index is None else index
        kept = ints.index_select(1, own)
        try:
            yield
        finally:
            ints.index_copy_(1, own, kept)

    def _widen(self, tree: int, items: int) -> None:
        """Make room for more items: pages that rows share count once in the cache, and once a row in attention."""
        old = self._lanes[tree].plan
        self._graphs.retire()
        rows, (heads, size) = old.first_item.shape[0] - 1, old.partial_out.shape[1:]
        plan = DecodePlan.allocate(rows, power_of_two(items), heads, size, self._rows.device)
        self._lanes[tree] = replace(self._lanes[tree], plan=plan)

    def _body(
        self, tree: int, size: int, chunk: int, items: int, lines: int, shares: bool, index: Tensor | None
    ) -> Tensor:
        """One decode of rows 0 .. size-1, or of those of `index`; their state on the device moves on by one token."""
        rows, cache, kernels, decoder = self._rows, self._cache, self._kernels, self._decoders[tree]
        lane = self._lanes[tree]
        outputs = self._drawn[:lines]
        if index is None:
            ints, floats, table, drawn = (
                rows.ints[:, :size],
                rows.floats[:, :size],
                rows.table[:size],
                outputs[:, :size],
            )
        else:
            ints, floats = rows.ints.index_select(1, index), rows.floats.index_select(1, index)
            table, drawn = rows.table.index_select(0, index), outputs.index_select(1, index)
        contexts = ints[CONTEXT]
        positions = contexts - 1
        page = table.gather(1, (positions // PAGE)[:, None])[:, 0]
        writes = page * PAGE + positions % PAGE
        sharing = Sharing(rows.sharing.pages[:size], rows.sharing.peers[:size]) if shares else None
        kernels.plan_items(lane.plan, contexts, chunk, items, sharing)

        def attend(layer: int, q: Tensor, out: Tensor, scale: float) -> None:
            keys, values = cache.of_layer[layer]
            kernels.paged_decode(q, keys, values, table, contexts, lane.plan, chunk, items, scale, out, sharing)

        logits = decoder(ints[TOKEN], positions, writes, ints[SLOT], attend, None)
        self._draw(logits, ints, floats, drawn, lane.workspace)
        if index is not None:
            rows.ints.index_copy_(1, index, ints)
            outputs.index_copy_(1, index, drawn)
        return logits

    def _draw(self, logits: Tensor, ints: Tensor, floats: Tensor, drawn: Tensor, workspace: Tensor) -> None:
        """Draw a token a row into `drawn` [lines, rows], and move the rows' state `ints` on; see `Pending`."""
        count = logits.shape[0]
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
        self._kernels.draw(logits, floats[TEMPERATURE], ints[SEED], ints[MADE], tokens, logprobs, workspace)
        if len(drawn) > 2:
            uniform = uniforms(ints[SEED], ints[MADE])
            truncation = Truncation(ints[TOP_K], floats[TOP_P], floats[MIN_P])
            cut, cut_logprobs, kept = sample(logits, uniform, floats[TEMPERATURE], truncation, any_greedy=True)
            assert kept is not None
            # The two round differently: a row that is not cut, or greedy, draws as it does beside none that is.
            uses = truncation.uses & (floats[TEMPERATURE] > 0)
            tokens, logprobs = torch.where(uses, cut, tokens), torch.where(uses, cut_logprobs, logprobs)
            drawn[2].copy_(kept.counts)
            drawn[3:].copy_(kept.order[:, : len(drawn) - 3].t())
        drawn[0].copy_(tokens)
        drawn[1].copy_(logprobs.view(torch.int32))
        ints[TOKEN].copy_(tokens)
        ints[CONTEXT].add_(ints[LIVE])
        ints[MADE].add_(ints[LIVE])

    def _expect(self, numbers: NDArray[np.int64], drawn: Tensor, places: NDArray[np.int64]) -> None:
        """Start the copy of a launch's results to the host."""
        serials = self._rows.launched(numbers)
        arrived = None
        if drawn.device.type == "cuda":
            outputs = torch.empty(drawn.shape, dtype=torch.int32, pin_memory=True)
            outputs.copy_(drawn, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        else:
            outputs = drawn.clone()
        self._pending.append(Pending(numbers, serials, outputs, places, arrived))
