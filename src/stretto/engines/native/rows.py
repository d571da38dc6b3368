"""The state of the decoding rows: tensors on the device, dense in 0 .. n-1, and host mirrors of what the host counts.

A step changes all rows with a handful of tensor operations. A row that finishes is replaced by the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.sampling import Kept, Truncation, mix_seed, sample, uniforms
from stretto.engines.native.supports import NO_SUPPORTS, SupportTable, grown, support_width
from stretto.engines.native.trajectory import Trajectory
from stretto.types import MAX_SUPPORT

TOKEN, CONTEXT, SLOT, SEED, TOP_K = range(5)
TEMPERATURE, TOP_P, MIN_P = range(3)
AHEAD = 32  # positions whose uniform numbers are made in one go


class Rows:
    """Up to `capacity` trajectories that decode together.

    The device holds what the next forward and draw read; the host holds what it counts along (every decoding row gains
    one token a step) and the outputs, which reach it in one transfer a step.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.token_device = device  # of prompts and page lists
        self.trajectories: list[Trajectory] = []
        self.ints = torch.zeros(5, capacity, dtype=torch.int64, device=device)
        self.floats = torch.zeros(3, capacity, dtype=torch.float32, device=device)
        self.cells = torch.zeros(capacity, 16 * PAGE, dtype=torch.int32, device=device)  # cache slot of each position
        self.numbers = torch.arange(capacity, device=device)
        self._everyone = np.arange(capacity)
        self._offsets = np.arange(PAGE, dtype=np.int32)
        self._uniform = torch.zeros(AHEAD, capacity, dtype=torch.float64, device=device)
        self._coming = torch.arange(AHEAD, device=device)[:, None]
        self._drawn = 0  # rows of `_uniform` that are used up
        self.context = np.zeros(capacity, dtype=np.int64)
        self.prompt = np.zeros(capacity, dtype=np.int64)
        self.limit = np.zeros(capacity, dtype=np.int64)
        self.slot = np.zeros(capacity, dtype=np.int64)
        self.held = np.zeros(capacity, dtype=np.int64)  # pages
        self.strings = np.zeros(capacity, dtype=np.bool_)
        self._greedy = np.zeros(capacity, dtype=np.bool_)
        self._heated = np.zeros(capacity, dtype=np.bool_)
        self._truncates = np.zeros(capacity, dtype=np.bool_)
        self._records = np.zeros(capacity, dtype=np.bool_)  # whose supports are kept
        self._supports = SupportTable(capacity)
        self._stops = np.full((capacity, 1), -1, dtype=np.int64)
        self._tokens = np.zeros((capacity, 64), dtype=np.int32)
        self._logprobs = np.zeros((capacity, 64), dtype=np.float32)
        self.any_strings = self._any_greedy = self._any_heated = self._any_truncates = False

    def __len__(self) -> int:
        return len(self.trajectories)

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Add rows. Each trajectory holds the pages of its context; its last token is in `tokens`, if it has any."""
        start, count = len(self.trajectories), len(trajectories)
        if not count:
            return
        ints, floats = np.zeros((5, count), dtype=np.int64), np.zeros((3, count), dtype=np.float32)
        self._reserve(
            max(len(t.tokens) for t in trajectories) + 1,
            max(len(t.sampling.stop_tokens) for t in trajectories),
            max(len(t.pages) for t in trajectories) * PAGE,
        )
        cells = np.zeros((count, self.cells.shape[1]), dtype=np.int32)
        for i, t in enumerate(trajectories):
            how, made, row, prompt = t.sampling, len(t.tokens), start + i, len(t.request.prompt)
            last = t.tokens[-1] if made else -1
            ints[:, i] = (last, prompt + made, t.slot, mix_seed(t.request.seed), how.top_k)
            floats[:, i] = (how.temperature, how.top_p, how.min_p)
            cells[i, : len(t.pages) * PAGE] = self._cells_of(t.pages)
            self.context[row], self.prompt[row], self.slot[row] = prompt + made, prompt, t.slot
            self.limit[row], self.held[row] = prompt + how.max_tokens, len(t.pages)
            self.strings[row] = bool(how.stop_strings)
            self._greedy[row], self._heated[row] = how.temperature <= 0, how.temperature != 1.0
            self._truncates[row], self._records[row] = how.truncates, support_width(how) > 0
            if self._records[row]:
                self._supports.put(row, t.supports or NO_SUPPORTS)
            self._stops[row] = -1
            self._stops[row, : len(how.stop_tokens)] = how.stop_tokens
            self._tokens[row, :made], self._logprobs[row, :made] = t.tokens, t.logprobs
            t.row = row
        end = start + count
        self.ints[:, start:end] = torch.from_numpy(ints)
        self.floats[:, start:end] = torch.from_numpy(floats)
        self.cells[start:end] = torch.from_numpy(cells)
        self.trajectories.extend(trajectories)
        self._draw_ahead(start, end)
        self._look()

    def _cells_of(self, pages: Sequence[int]) -> NDArray[np.int32]:
        return (np.asarray(pages, dtype=np.int32)[:, None] * PAGE + self._offsets).reshape(-1)

    def _look(self) -> None:
        """Which ways of drawing the rows use, once for all steps until rows come or go."""
        n = len(self.trajectories)
        self.any_strings, self._any_greedy = bool(self.strings[:n].any()), bool(self._greedy[:n].any())
        self._any_heated, self._any_truncates = bool(self._heated[:n].any()), bool(self._truncates[:n].any())

    def _reserve(self, tokens: int = 0, stops: int = 0, cells: int = 0) -> None:
        """Grow the outputs and the table of cells by doubling, and the table of stop tokens to the widest."""
        self._tokens, self._logprobs = grown(self._tokens, tokens), grown(self._logprobs, tokens)
        if stops > self._stops.shape[1]:
            self._stops = np.pad(self._stops, ((0, 0), (0, stops - self._stops.shape[1])), constant_values=-1)
        if cells > self.cells.shape[1]:
            width = max(cells, 2 * self.cells.shape[1]) - self.cells.shape[1]
            self.cells = torch.nn.functional.pad(self.cells, (0, width))

    def _draw_ahead(self, start: int, end: int) -> None:
        """Make the uniform numbers that rows will use before the next time that all are made."""
        made = torch.from_numpy(self.context[start:end] - self.prompt[start:end] - self._drawn).to(self.device)
        self._uniform[:, start:end] = uniforms(self.ints[SEED, start:end], made + self._coming)

    def lacking(self) -> list[Trajectory]:
        """The rows whose next token needs a page that they do not hold."""
        n = len(self.trajectories)
        lacking = np.nonzero(-(-self.context[:n] // PAGE) > self.held[:n])[0]
        return [self.trajectories[i] for i in lacking.tolist()]

    def grant(self, granted: Sequence[tuple[Trajectory, int]]) -> None:
        """Enter new pages into the table of cells, in one transfer."""
        rows = [t.row for t, _ in granted]
        columns = self.held[rows]
        self.held[rows] += 1
        self._reserve(cells=(int(columns.max()) + 1) * PAGE)
        place = np.asarray(rows)[:, None] * self.cells.shape[1] + columns[:, None] * PAGE + self._offsets
        cells = self._cells_of([page for _, page in granted])
        where, what = torch.from_numpy(place.reshape(-1)), torch.from_numpy(cells)
        self.cells.view(-1).index_copy_(0, where.to(self.device), what.to(self.device))

    def sample(self, logits: Tensor) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Draw a token for every row from logits [rows, vocabulary].

        Returns which rows end, which drew a stop token, and which had no distribution to draw from, each [rows].
        """
        n = len(self.trajectories)
        if self._drawn == AHEAD:
            self._drawn = 0
            self._draw_ahead(0, n)
        floats, truncation = self.floats, None
        if self._any_truncates:
            truncation = Truncation(self.ints[TOP_K, :n], floats[TOP_P, :n], floats[MIN_P, :n])
        heat = floats[TEMPERATURE, :n] if self._any_heated else None
        uniform = self._uniform[self._drawn, :n]
        drawn, under, kept = sample(logits, uniform, heat, truncation, self._any_greedy)
        self._drawn += 1
        self.ints[TOKEN, :n] = drawn
        self.ints[CONTEXT, :n].add_(1)
        tokens, logprobs = self._to_host(drawn, under)
        context = self.context[:n]
        made = context - self.prompt[:n]
        self._reserve(int(made.max()) + 1)
        everyone = self._everyone[:n]
        self._tokens[everyone, made], self._logprobs[everyone, made] = tokens, logprobs
        context += 1
        stopped = (tokens[:, None] == self._stops[:n]).any(1)
        broken = np.isnan(logprobs)
        if kept is not None:
            broken |= self._record(kept)
        return stopped | broken | (context >= self.limit[:n]), stopped, broken

    def _record(self, kept: Kept) -> NDArray[np.bool_]:
        """Keep what the rows drew from; which rows had more to draw from than is kept [rows]."""
        n = len(self.trajectories)
        counts = kept.counts.int().cpu().numpy()
        records = self._records[:n]
        rows = np.nonzero(records)[0]
        width = min(int(counts[rows].max(initial=1)), MAX_SUPPORT)
        tokens = kept.order[:, :width].int().cpu().numpy()
        self._supports.record(rows, counts[rows], tokens[rows])
        return records & (counts > MAX_SUPPORT)

    @staticmethod
    def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if tokens.device.type == "cpu":
            return tokens.numpy(), logprobs.numpy()
        packed = torch.stack((tokens.int(), logprobs.view(torch.int32))).cpu().numpy()
        return packed[0], packed[1].view(np.float32)

    def made_of_slots(self) -> Iterator[tuple[int, int]]:
        """The slot of each row, and the tokens that it has made."""
        n = len(self.trajectories)
        return zip(self.slot[:n].tolist(), (self.context[:n] - self.prompt[:n]).tolist(), strict=True)

    def output(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of a row's tokens and log-probabilities so far."""
        made = int(self.context[row] - self.prompt[row])
        return self._tokens[row, :made].copy(), self._logprobs[row, :made].copy()

    def save(self, trajectory: Trajectory) -> None:
        """Write what a row has made to its trajectory."""
        row = trajectory.row
        trajectory.tokens, trajectory.logprobs = self.output(row)
        trajectory.supports = self._supports.of(row) if self._records[row] else None

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out; the last ones move into the holes."""
        gone = set(rows)
        n = len(self.trajectories)
        left = n - len(gone)
        for row in gone:
            self.trajectories[row].row = -1
        holes = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, n) if row not in gone]
        if holes:
            for hole, mover in zip(holes, movers, strict=True):
                self.trajectories[hole] = self.trajectories[mover]
                self.trajectories[hole].row = hole
            target, source = torch.tensor(holes, device=self.device), torch.tensor(movers, device=self.device)
            for tensor in (self.ints, self.floats, self._uniform):
                tensor[:, target] = tensor[:, source]
            self.cells[target] = self.cells[source]
            for mirror in self._mirrors():
                mirror[holes] = mirror[movers]
            self._supports.move(holes, movers)
        del self.trajectories[left:]
        self._look()

    def _mirrors(self) -> tuple[NDArray[Any], ...]:
        counted = (self.context, self.prompt, self.limit, self.slot, self.held, self._stops)
        flags = (self.strings, self._greedy, self._heated, self._truncates, self._records)
        return (*counted, *flags, self._tokens, self._logprobs)
