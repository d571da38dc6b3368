"""The state of the decoding rows: tensors on the device, and arrays on the host for the numbers that the host counts.

The device advances its own state in a decode step: each row's last token, its context, the index of its next token. The
host counts what it can know (contexts grow by one a launch) and learns the tokens when their copy arrives, which may be
one launch later. So each row has a serial number: a result is dropped if it arrives for a row that meanwhile holds
another trajectory, or none. Batches are padded with free rows, which write to the scratch page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.device_memory import to_device, to_device_together
from stretto.engines.native.sampling import mix_seed
from stretto.engines.native.sequence import SequenceState
from stretto.engines.native.shared_pages import SharedPages
from stretto.engines.native.token_supports import NO_SUPPORTS, SupportTable, grown, support_width
from stretto.types import MAX_SUPPORT, FinishReason

TOKEN, CONTEXT, SLOT, SEED, TOP_K, MADE, LIVE = range(7)
TEMPERATURE, TOP_P, MIN_P = range(3)
MAX_PADDING = 64  # rows that pad a mixed batch
FREE = (0, 1, 0, 0, 0, 0, 0)  # of a row without a trajectory: one token of context, in the scratch page

HOST_FIELDS = np.dtype(
    [
        ("serial", np.int64),
        ("context", np.int64),  # tokens, as launched
        ("made", np.int64),  # tokens, as recorded
        ("limit", np.int64),  # tokens to make
        ("end", np.int64),  # context, as launched, once all of them are
        ("slot", np.int64),
        ("pages", np.int64),
        ("width", np.int64),  # the most tokens that a support may have; 0: none is recorded
        ("seed", np.int64),  # mixed
        ("strings", np.bool_),  # it has stop strings
        ("truncates", np.bool_),
        ("greedy", np.bool_),
        ("scaled", np.bool_),  # its temperature is not 1
    ]
)
FREE_ON_HOST = (-1, 1, 0, 0, 0, 0, 1, 0, 0, False, False, False, False)

Ending = tuple[int, FinishReason | None, bool]
"""A row that may end, the reason (None: only a stop string may end it), and whether its draw failed."""


class Drawn(NamedTuple):
    """The results of a draw on the host, one entry a row. The last two are None if no row is truncated."""

    tokens: NDArray[Any]  # [rows] integers
    logprobs: NDArray[np.float32]  # [rows]
    counts: NDArray[Any] | None  # [rows] integers: how many tokens were left to draw from
    candidates: NDArray[Any] | None  # [rows, width] integers: these tokens, likely ones first


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched draw whose results are on their way to the host."""

    rows: NDArray[np.int64]  # the rows that were drawn for
    serials: NDArray[np.int64]  # of the trajectories that they held
    outputs: Tensor  # host memory, [2 or more, rows]: tokens, the bits of their float32 log-probabilities; if rows are
    # truncated, the number of tokens that were left to draw from, and the first of these
    places: NDArray[np.int64]  # the column of each row in `outputs`
    arrived: torch.cuda.Event | None  # None: already there

    def wait(self) -> Drawn:
        """Waits for the results and returns them in the order of `rows`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: NDArray[np.int32] = self.outputs.numpy()[:, self.places]
        logprobs = values[1].view(np.float32)
        return Drawn(values[0], logprobs, *((values[2], values[3:].T) if len(values) > 2 else (None, None)))


class Rows:
    """Up to `capacity` trajectories that decode together. A row keeps its place until `compact` moves it.

    Rows from `capacity` on are never used by a trajectory. With `mixed` (see `MixedForward`) the table lists the cache
    slot of every position of a row, and a free row is valid on the device after `clear_from`. Otherwise the table lists
    the pages of each row, a free row is always valid, and `shared` lists the rows that share the first pages of a
    prompt.
    """

    def __init__(self, capacity: int, max_context: int, device: torch.device, *, mixed: bool) -> None:
        self.capacity, self.device, self._mixed = capacity, device, mixed
        # A row that has ended may be found out only after one more launch: room for one token beyond the longest.
        max_pages, size = -(-(max_context + 1) // PAGE), capacity + (MAX_PADDING if mixed else 1)
        self._entries = PAGE if mixed else 1  # of the table, a page
        self._free = torch.tensor(FREE, dtype=torch.int64, device=device)[:, None]
        self.ints = self._free.repeat(1, size)
        self.floats = torch.ones(3, size, dtype=torch.float32, device=device)
        self.table = torch.zeros(size, max_pages * self._entries, dtype=torch.int32, device=device)
        self.shared = None if mixed else SharedPages(size, device)
        self._of_row: dict[int, SequenceState] = {}
        self._unused = list(range(capacity))  # a heap
        self._changed: dict[int, SequenceState | None] = {}  # rows to upload before the next launch
        self._granted: list[tuple[int, int, int]] = []  # row, number of the page in the row, page
        self._issued = self._used_end = 0
        self._numbers: NDArray[np.int64] | None = None
        self._host = np.zeros(size, dtype=HOST_FIELDS)
        self._host[:] = FREE_ON_HOST
        self.context: NDArray[np.int64] = self._host["context"]
        self.made: NDArray[np.int64] = self._host["made"]
        self.slot: NDArray[np.int64] = self._host["slot"]
        self.seed: NDArray[np.int64] = self._host["seed"]
        self.width: NDArray[np.int64] = self._host["width"]
        self.truncates: NDArray[np.bool_] = self._host["truncates"]
        self.any_greedy = self.any_scaled = self.any_truncates = False  # of the rows in use, after `numbers`
        self._supports = SupportTable(size)
        self._stops = np.full((size, 1), -1, dtype=np.int64)
        self._tokens = np.zeros((size, 64), dtype=np.int32)
        self._logprobs = np.zeros((size, 64), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._of_row)

    @property
    def trajectories(self) -> list[SequenceState]:
        return list(self._of_row.values())

    def numbers(self) -> NDArray[np.int64]:
        """Returns the rows in use, ascending."""
        if self._numbers is None:
            self._numbers = np.array(sorted(self._of_row), dtype=np.int64)
            host = self._host[self._numbers]
            self.any_greedy, self.any_scaled = bool(host["greedy"].any()), bool(host["scaled"].any())
            self.any_truncates = bool(host["truncates"].any())
        return self._numbers

    def at(self, row: int) -> SequenceState:
        return self._of_row[row]

    def made_by_slot(self) -> Iterator[tuple[int, int]]:
        """Yields the slot of each row and the number of tokens that the row has made."""
        rows = self.numbers()
        return zip(self.slot[rows].tolist(), self.made[rows].tolist(), strict=True)

    # -- changes, on the host until `upload` ---------------------------------------------------------------------------

    def append(self, trajectories: Sequence[SequenceState]) -> None:
        """Adds rows. Each trajectory holds the pages of its context; its last token is in `tokens`, if it has any."""
        for t in trajectories:
            row = t.row = heappop(self._unused)
            how, made = t.sampling, len(t.tokens)
            self._of_row[row] = self._changed[row] = t
            width, temperature = support_width(how), how.temperature
            prompt = len(t.request.prompt)
            self._host[row] = (
                self._issued, prompt + made, made, how.max_tokens, prompt + how.max_tokens, t.slot, len(t.pages), width,
                mix_seed(t.request.seed), bool(how.stop_strings), how.truncates, temperature <= 0, temperature != 1.0,
            )  # fmt: skip
            self._issued += 1
            self._used_end = max(self._used_end, row + 1)
            if width:
                self._supports.put(row, t.supports or NO_SUPPORTS)
            if self.shared is not None:
                self.shared.add(row, t)
            self._reserve(made + 2, len(how.stop_tokens))
            self._stops[row] = -1
            self._stops[row, : len(how.stop_tokens)] = how.stop_tokens
            self._tokens[row, :made], self._logprobs[row, :made] = t.tokens, t.logprobs
        self._numbers = None

    def _reserve(self, tokens: int = 0, stops: int = 0) -> None:
        if tokens > self._tokens.shape[1]:
            self._tokens, self._logprobs = grown(self._tokens, tokens), grown(self._logprobs, tokens)
        if stops > self._stops.shape[1]:
            self._stops = np.pad(self._stops, ((0, 0), (0, stops - self._stops.shape[1])), constant_values=-1)

    def remove(self, row: int) -> None:
        """Takes a row out; results on their way to it are dropped."""
        trajectory = self._of_row.pop(row)
        if self.shared is not None:
            self.shared.discard(row, trajectory)
        trajectory.row = -1
        self._vacate(row)
        heappush(self._unused, row)

    def _vacate(self, row: int) -> None:
        if self._mixed:
            self._changed.pop(row, None)
        else:
            self._changed[row] = None
        self._host[row] = FREE_ON_HOST
        self._numbers = None

    @property
    def any_due(self) -> bool:
        """True if a row has not been launched for all tokens that it may make."""
        return bool((self.context < self._host["end"]).any())

    def lacking(self) -> list[SequenceState]:
        """Returns the rows whose next token needs a page that they do not hold."""
        rows = np.nonzero(-(-self.context // PAGE) > self._host["pages"])[0]
        return [self._of_row[row] for row in rows.tolist()]

    def grant(self, granted: Sequence[tuple[SequenceState, int]]) -> None:
        """Gives each trajectory one more page."""
        for trajectory, page in granted:
            row = trajectory.row
            self._granted.append((row, int(self._host["pages"][row]), page))
            self._host["pages"][row] += 1

    @property
    def dense(self) -> bool:
        """True if no row beyond the number of trajectories is used."""
        return not self._unused or self._unused[0] >= len(self._of_row)

    def compact(self) -> None:
        """Moves rows into the lowest places. No results may be on their way to the host."""
        if self.dense:
            return
        self.upload()
        count = len(self._of_row)
        target = sorted(row for row in self._unused if row < count)
        source = sorted((row for row in self._of_row if row >= count), reverse=True)
        there, here = (to_device(np.array(side, dtype=np.int64), self.device) for side in (source, target))
        for tensor in (self.ints, self.floats):
            tensor.index_copy_(1, here, tensor.index_select(1, there))
        self.table.index_copy_(0, here, self.table.index_select(0, there))
        for array in (self._host, self._stops, self._tokens, self._logprobs):
            array[target] = array[source]
        self._supports.move(target, source)
        for old, new in zip(source, target, strict=True):
            trajectory = self._of_row.pop(old)
            self._of_row[new] = trajectory
            trajectory.row = new
            if self.shared is not None:
                self.shared.discard(old, trajectory)
                self.shared.add(new, trajectory)
            self._vacate(old)
        self._unused = list(range(count, self.capacity))

    # -- the device ----------------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Brings what changed on the host to the device, behind what was launched before, in one copy."""
        lists = [] if self.shared is None else self.shared.changes()
        changed = self._changed_rows() if self._changed else []
        granted = self._granted_pages() if self._granted else []
        self._changed, self._granted = {}, []
        arrays = [*lists, *changed, *granted]
        if not arrays:
            return
        brought = iter(to_device_together(arrays, self.device))
        if lists and self.shared is not None:
            self.shared.sharing.pages.copy_(next(brought))
            self.shared.sharing.peers.copy_(next(brought))
        if changed:
            index = next(brought)
            self.ints.index_copy_(1, index, next(brought))
            self.floats.index_copy_(1, index, next(brought))
            self.table.index_copy_(0, index, next(brought))
        if granted:
            self.table.view(-1).index_copy_(0, next(brought), next(brought))

    def _granted_pages(self) -> list[NDArray[Any]]:
        """Returns the places of new pages in the table and the pages, without those of rows that are uploaded whole."""
        granted = [entry for entry in self._granted if entry[0] not in self._changed]
        if not granted:
            return []
        row, number, page = np.array(granted, dtype=np.int64).T
        width, entries = self.table.shape[1], self._entries
        place = row * width + number * entries
        if entries > 1:
            offsets = np.arange(entries)
            place = (place[:, None] + offsets).reshape(-1)
            page = (page[:, None] * entries + offsets).reshape(-1)
        return [place, page.astype(np.int32)]

    def _changed_rows(self) -> list[NDArray[Any]]:
        """Returns the numbers of changed rows with their integers, floats and tables."""
        count, entries = len(self._changed), self._entries
        ints, floats = np.empty((7, count), dtype=np.int64), np.ones((3, count), dtype=np.float32)
        table = np.zeros((count, self.table.shape[1] // entries, entries), dtype=np.int32)
        offsets = np.arange(entries)
        for i, (row, t) in enumerate(self._changed.items()):
            if t is None:
                ints[:, i] = FREE
                continue
            how, made = t.sampling, len(t.tokens)
            last = t.tokens[-1] if made else 0
            ints[:, i] = (last, len(t.request.prompt) + made, t.slot, self.seed[row], how.top_k, made, 1)
            floats[:, i] = (how.temperature, how.top_p, how.min_p)
            table[i, : len(t.pages)] = np.array(t.pages)[:, None] * entries + offsets
        index = np.array(list(self._changed), dtype=np.int64)
        return [index, ints, floats, table.reshape(count, -1)]

    def clear_from(self, start: int) -> None:
        """Makes the free rows from `start` on valid on the device; no row there is in use."""
        if start < self._used_end:
            self.ints[:, start : self._used_end] = self._free
            self.table[start : self._used_end, 0] = 0
            self._used_end = start

    def launched(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts a draw for `rows` and returns their serial numbers."""
        self.context[rows] += 1
        serials: NDArray[np.int64] = self._host["serial"][rows]
        return serials

    def current(self, pending: Pending) -> tuple[NDArray[np.int64], Drawn]:
        """Waits for the results of a launch; returns those of rows that still hold the trajectory drawn for."""
        drawn, current = pending.wait(), self._host["serial"][pending.rows] == pending.serials
        if current.all():
            return pending.rows, drawn
        tokens, logprobs, counts, candidates = drawn
        if counts is not None and candidates is not None:
            counts, candidates = counts[current], candidates[current]
        return pending.rows[current], Drawn(tokens[current], logprobs[current], counts, candidates)

    def record(self, rows: NDArray[np.int64], drawn: Drawn) -> list[Ending]:
        """Takes in one draw for each of `rows`; returns the rows that may end with it."""
        if not len(rows):
            return []
        tokens, logprobs, counts, candidates = drawn
        own = slice(len(rows)) if self._mixed else rows  # the same rows, in the order in which they are dense
        host = self._host[own]
        made = host["made"]
        try:
            self._tokens[rows, made] = tokens
        except IndexError:  # seldom, and cheaper than to look first
            self._reserve(int(made.max()) + 1)
            self._tokens[rows, made] = tokens
        self._logprobs[rows, made] = logprobs
        after = made + 1
        self.made[own] = after
        stopped = (tokens[:, None] == self._stops[own]).any(1)
        broken = np.isnan(logprobs)
        if counts is not None and candidates is not None:
            recorded = np.nonzero(host["width"])[0]
            self._supports.record(rows[recorded], counts[recorded], candidates[recorded])
            broken[recorded] |= counts[recorded] > MAX_SUPPORT
        full = after >= host["limit"]
        ending = np.nonzero(stopped | broken | full | host["strings"])[0]
        return [
            (int(rows[i]), "stop" if stopped[i] else "length" if full[i] or broken[i] else None, bool(broken[i]))
            for i in ending
        ]

    def output(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns copies of a row's tokens and log-probabilities so far."""
        made = int(self.made[row])
        return self._tokens[row, :made].copy(), self._logprobs[row, :made].copy()

    def save(self, trajectory: SequenceState) -> None:
        """Writes the outputs of a row to its trajectory."""
        row = trajectory.row
        trajectory.tokens, trajectory.logprobs = self.output(row)
        trajectory.supports = self._supports.of(row) if self.width[row] else None
