"""The decoding rows where the host runs one step behind the device.

The device advances its own state inside a captured step: each row's last token, its context, the index of its next
token. The host counts along what it can know (contexts grow by one a launch) and learns tokens one launch later. So a
row keeps its place for its life, and each has a serial number: a result that arrives for a row which meanwhile holds
another trajectory, or none, is dropped. Row `capacity` is never used: batches are filled up with it, and with rows that
are free; they write to the scratch page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.plan import Sharing
from stretto.engines.native.sampling import mix_seed
from stretto.engines.native.supports import NO_SUPPORTS, SupportTable, grown, support_width
from stretto.engines.native.trajectory import Trajectory
from stretto.types import MAX_SUPPORT, FinishReason

TOKEN, CONTEXT, SLOT, SEED, TOP_K, MADE, LIVE = range(7)
TEMPERATURE, TOP_P, MIN_P = range(3)
PEERS = 8  # rows of a group that read their common pages together
FREE = (0, 1, 0, 0, 0, 0, 0)  # a row without a trajectory: one token of context, in the scratch page


def to_device(array: NDArray[np.generic] | Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for what the device still has to do."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def put(into: Tensor, tensor: Tensor) -> None:
    """Copy from the host into memory of a device, without waiting for what the device still has to do."""
    into.copy_(tensor if into.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched draw whose tokens are on their way to the host."""

    rows: NDArray[np.int64]  # which rows were drawn for
    serials: NDArray[np.int64]  # which trajectories they held
    outputs: Tensor  # host memory, [2 or more, rows]: tokens, the bits of their float32 log-probabilities; where rows
    # are truncated, how many tokens were left to draw from, and the first of these
    places: NDArray[np.int64]  # where each row is in `outputs`
    arrived: torch.cuda.Event | None  # None: already there

    def wait(self) -> NDArray[np.int32]:
        """The outputs, in the order of `rows`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: NDArray[np.int32] = self.outputs.numpy()[:, self.places]
        return values


class DeviceRows:
    """Up to `capacity` trajectories that decode together, each in a fixed row."""

    def __init__(self, capacity: int, max_context: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.token_device = torch.device("cpu")  # of prompts and page lists until a forward takes them
        # A row that has ended is only found out after one more launch: room for one token beyond the longest.
        self.max_pages = -(-(max_context + 1) // PAGE)
        size = capacity + 1
        self.ints = torch.tensor(FREE, dtype=torch.int64, device=device)[:, None].repeat(1, size)
        self.floats = torch.ones(3, size, dtype=torch.float32, device=device)
        self.table = torch.zeros(size, self.max_pages, dtype=torch.int32, device=device)
        self._of_row: dict[int, Trajectory] = {}
        self._unused = list(range(capacity))
        self._changed: dict[int, Trajectory | None] = {}  # rows to upload before the next launch
        self._granted: list[tuple[int, int, int]] = []  # row, column, page
        self._issued = 0
        self._sharers: dict[int, set[int]] = {}  # the last page that rows have in common -> those rows
        self.shared = np.zeros(size, dtype=np.int64)  # first pages of a row that others may have too
        self.sharing = Sharing(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.full((size, PEERS), -1, dtype=torch.int32, device=device),
        )
        self.saved = 0  # tokens of context that need not be read again by rows that share them
        self._shares_anew = False
        self.serial = np.full(size, -1, dtype=np.int64)
        self.context = np.ones(size, dtype=np.int64)  # as launched
        self.made = np.zeros(size, dtype=np.int64)  # as recorded
        self.prompt = np.zeros(size, dtype=np.int64)
        self.limit = np.zeros(size, dtype=np.int64)  # tokens to make
        self.slot = np.zeros(size, dtype=np.int64)
        self.held = np.zeros(size, dtype=np.int64)  # pages
        self.strings = np.zeros(size, dtype=np.bool_)
        self.truncates = np.zeros(size, dtype=np.bool_)
        self.width = np.zeros(size, dtype=np.int64)  # the most tokens that a support may have; 0: none is recorded
        self._supports = SupportTable(size)
        self._stops = np.full((size, 1), -1, dtype=np.int64)
        self._tokens = np.zeros((size, 64), dtype=np.int32)
        self._logprobs = np.zeros((size, 64), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._of_row)

    @property
    def trajectories(self) -> list[Trajectory]:
        return list(self._of_row.values())

    def numbers(self) -> NDArray[np.int64]:
        """The rows in use, ascending."""
        return np.array(sorted(self._of_row), dtype=np.int64)

    def at(self, row: int) -> Trajectory:
        return self._of_row[row]

    def made_of_slots(self) -> Iterator[tuple[int, int]]:
        """The slot of each row, and the tokens that it has made."""
        return ((int(self.slot[row]), int(self.made[row])) for row in self._of_row)

    # -- changes, on the host until `upload` ---------------------------------------------------------------------------

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Add rows. Each trajectory holds the pages of its context; its last token is in `tokens`, if it has any."""
        for t in trajectories:
            row = t.row = heappop(self._unused)
            how, made, prompt = t.sampling, len(t.tokens), len(t.request.prompt)
            self._of_row[row] = t
            self._changed[row] = t
            self.serial[row] = self._issued
            self._issued += 1
            self.context[row], self.made[row], self.prompt[row] = prompt + made, made, prompt
            self.limit[row], self.slot[row], self.held[row] = how.max_tokens, t.slot, len(t.pages)
            self.strings[row] = bool(how.stop_strings)
            self.truncates[row], self.width[row] = how.truncates, support_width(how)
            if self.width[row]:
                self._supports.put(row, t.supports or NO_SUPPORTS)
            self._join(row, t)
            self._reserve(made + 2, len(how.stop_tokens))
            self._stops[row] = -1
            self._stops[row, : len(how.stop_tokens)] = how.stop_tokens
            self._tokens[row, :made], self._logprobs[row, :made] = t.tokens, t.logprobs

    def _join(self, row: int, trajectory: Trajectory) -> None:
        """Note the page in which the full pages of a row's prompt end: who has it too has all that come before."""
        full = len(trajectory.request.prompt) // PAGE
        self.shared[row] = full
        if full:
            self._sharers.setdefault(trajectory.pages[full - 1], set()).add(row)
            self._shares_anew = True

    def _part(self, row: int, trajectory: Trajectory) -> None:
        full = int(self.shared[row])
        if full:
            page = trajectory.pages[full - 1]
            self._sharers[page].discard(row)
            if not self._sharers[page]:
                del self._sharers[page]
            self._shares_anew = True
        self.shared[row] = 0

    def _reserve(self, tokens: int = 0, stops: int = 0) -> None:
        self._tokens, self._logprobs = grown(self._tokens, tokens), grown(self._logprobs, tokens)
        if stops > self._stops.shape[1]:
            self._stops = np.pad(self._stops, ((0, 0), (0, stops - self._stops.shape[1])), constant_values=-1)

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out; results on their way to them are dropped."""
        for row in rows:
            trajectory = self._of_row.pop(row)
            self._part(row, trajectory)
            trajectory.row = -1
            self._vacate(row)
            heappush(self._unused, row)

    def _vacate(self, row: int) -> None:
        self._changed[row] = None
        self.serial[row], self.context[row], self.held[row], self.width[row] = -1, 1, 0, 0
        self.truncates[row] = self.strings[row] = False

    def lacking(self) -> list[Trajectory]:
        """The rows whose next token needs a page that they do not hold."""
        rows = np.nonzero(-(-self.context[:-1] // PAGE) > self.held[:-1])[0]
        return [self._of_row[row] for row in rows.tolist() if row in self._of_row]

    def grant(self, granted: Sequence[tuple[Trajectory, int]]) -> None:
        """Enter new pages into the table."""
        for trajectory, page in granted:
            row = trajectory.row
            self._granted.append((row, int(self.held[row]), page))
            self.held[row] += 1

    def dense(self) -> bool:
        """Whether no row beyond the number of trajectories is used."""
        return not self._of_row or max(self._of_row) < len(self._of_row)

    def compact(self) -> None:
        """Move rows into the lowest places. Nothing may be on its way to the host."""
        self.upload()
        holes = sorted(self._unused)
        movers = sorted(self._of_row, reverse=True)
        pairs = [(m, h) for m, h in zip(movers, holes, strict=False) if h < m]
        if not pairs:
            return
        source, target = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        there, here = to_device(source, self.device), to_device(target, self.device)
        for tensor in (self.ints, self.floats):
            tensor.index_copy_(1, here, tensor.index_select(1, there))
        self.table.index_copy_(0, here, self.table.index_select(0, there))
        mirrors = (self.serial, self.context, self.made, self.prompt, self.limit, self.slot, self.held)
        flags = (self.strings, self.truncates, self.width)
        for mirror in (*mirrors, *flags, self._stops, self._tokens, self._logprobs):
            mirror[target] = mirror[source]
        self._supports.move(target, source)
        for old, new in pairs:
            trajectory = self._of_row.pop(old)
            self._part(old, trajectory)
            self._of_row[new] = trajectory
            self._join(new, trajectory)
            trajectory.row = new
            self._vacate(old)
        self._unused = sorted(set(range(self.capacity)) - set(self._of_row))

    # -- the device ----------------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Bring what changed on the host to the device, behind what was launched before."""
        if self._changed:
            rows = np.array(list(self._changed), dtype=np.int64)
            ints = np.empty((7, len(rows)), dtype=np.int64)
            floats = np.ones((3, len(rows)), dtype=np.float32)
            pages = np.zeros((len(rows), self.max_pages), dtype=np.int32)
            for i, t in enumerate(self._changed.values()):
                if t is None:
                    ints[:, i] = FREE
                    continue
                how, made = t.sampling, len(t.tokens)
                last = int(t.tokens[-1]) if made else 0
                seed = mix_seed(t.request.seed)
                ints[:, i] = (last, len(t.request.prompt) + made, t.slot, seed, how.top_k, made, 1)
                floats[:, i] = (how.temperature, how.top_p, how.min_p)
                pages[i, : len(t.pages)] = t.pages
            index = to_device(rows, self.device)
            self.ints.index_copy_(1, index, to_device(ints, self.device))
            self.floats.index_copy_(1, index, to_device(floats, self.device))
            self.table.index_copy_(0, index, to_device(pages, self.device))
        granted = [entry for entry in self._granted if entry[0] not in self._changed]
        if granted:
            entries = np.array(granted, dtype=np.int64)
            place = to_device(entries[:, 0] * self.max_pages + entries[:, 1], self.device)
            page = to_device(entries[:, 2].astype(np.int32), self.device)
            self.table.view(-1).index_copy_(0, place, page)
        self._changed, self._granted = {}, []
        if self._shares_anew:
            self._upload_sharing()

    def _upload_sharing(self) -> None:
        """List the rows that share pages, up to `PEERS` to a list, on the lowest of each list."""
        pages = np.zeros(self.capacity + 1, dtype=np.int32)
        peers = np.full((self.capacity + 1, PEERS), -1, dtype=np.int32)
        self.saved = 0
        for rows in self._sharers.values():
            if len(rows) < 2:
                continue
            ordered = sorted(rows)
            for start in range(0, len(ordered), PEERS):
                own = ordered[start : start + PEERS]
                if len(own) > 1:
                    pages[own] = self.shared[own[0]]
                    peers[own[0], : len(own)] = own
                    self.saved += (len(own) - 1) * int(self.shared[own[0]]) * PAGE
        self.sharing.pages.copy_(to_device(pages, self.device))
        self.sharing.peers.copy_(to_device(peers, self.device))
        self._shares_anew = False

    def launched(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count a draw for `rows`; their serial numbers."""
        self.context[rows] += 1
        return self.serial[rows].copy()

    def record(self, pending: Pending) -> tuple[int, list[tuple[int, FinishReason | None, bool]]]:
        """Take the results of a launch in: how many tokens count, and each row that may end.

        Of such a row, why it ends (None: only a string may end it), and whether it had no distribution to draw from.
        What was drawn for a row that had ended already counts for nothing.
        """
        current = self.serial[pending.rows] == pending.serials
        rows, values = pending.rows[current], pending.wait()[:, current]
        if not len(rows):
            return 0, []
        tokens, logprobs = values[0], values[1].view(np.float32)
        made = self.made[rows]
        self._reserve(int(made.max()) + 1)
        self._tokens[rows, made], self._logprobs[rows, made] = tokens, logprobs
        self.made[rows] = made + 1
        stopped = (tokens[:, None] == self._stops[rows]).any(1)
        broken = np.isnan(logprobs)
        recorded = np.nonzero(self.width[rows])[0]
        if len(recorded):
            self._supports.record(rows[recorded], values[2, recorded], values[3:, recorded].T)
            broken[recorded] |= values[2, recorded] > MAX_SUPPORT
        full = made + 1 >= self.limit[rows]
        chosen = np.nonzero(stopped | broken | full | self.strings[rows])[0]
        return len(rows), [
            (int(rows[i]), "stop" if stopped[i] else "length" if full[i] or broken[i] else None, bool(broken[i]))
            for i in chosen
        ]

    def output(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of a row's tokens and log-probabilities so far."""
        made = int(self.made[row])
        return self._tokens[row, :made].copy(), self._logprobs[row, :made].copy()

    def save(self, trajectory: Trajectory) -> None:
        """Write what a row has made to its trajectory."""
        row = trajectory.row
        trajectory.tokens, trajectory.logprobs = self.output(row)
        trajectory.supports = self._supports.of(row) if self.width[row] else None
