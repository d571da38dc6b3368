"""The state of the decoding rows: tensors on the device, dense in 0 .. n-1, and host mirrors of what the host counts.

A step changes all rows with a handful of tensor operations. A row that finishes is replaced by the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import PAGE, num_pages
from stretto.engines.native.sampling import mix_seed, sample, uniforms
from stretto.engines.native.trajectory import Trajectory

TOKEN, CONTEXT, PROMPT, LIMIT, SLOT, SEED, TOP_K = range(7)
TEMPERATURE, TOP_P, MIN_P = range(3)


class Rows:
    """Up to `capacity` trajectories that decode together."""

    def __init__(self, capacity: int, max_context: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.trajectories: list[Trajectory] = []
        self.ints = torch.zeros(7, capacity, dtype=torch.int64, device=device)
        self.floats = torch.zeros(3, capacity, dtype=torch.float32, device=device)
        self.stops = torch.full((capacity, 1), -1, dtype=torch.int64, device=device)
        self.pages = torch.zeros(capacity, num_pages(max_context), dtype=torch.int32, device=device)
        self.out_tokens = torch.zeros(capacity, 64, dtype=torch.int32, device=device)
        self.out_logprobs = torch.zeros(capacity, 64, dtype=torch.float32, device=device)
        self._numbers = torch.arange(capacity, device=device)
        # Host mirrors: every decoding row gains one token a step, so the host counts along.
        self.context = np.zeros(capacity, dtype=np.int64)
        self.prompt = np.zeros(capacity, dtype=np.int64)
        self.slot = np.zeros(capacity, dtype=np.int64)
        self.held = np.zeros(capacity, dtype=np.int64)  # pages
        self.greedy = np.zeros(capacity, dtype=np.bool_)
        self.truncates = np.zeros(capacity, dtype=np.bool_)
        self.strings = np.zeros(capacity, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.trajectories)

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Add rows. Each trajectory holds the pages of its context; its last token is in `tokens`, if it has any."""
        start, count = len(self.trajectories), len(trajectories)
        if not count:
            return
        ints, floats = np.zeros((7, count), dtype=np.int64), np.zeros((3, count), dtype=np.float32)
        self._reserve(
            max(len(t.tokens) for t in trajectories) + 1, max(len(t.sampling.stop_tokens) for t in trajectories)
        )
        stops = np.full((count, self.stops.shape[1]), -1, dtype=np.int64)
        pages = np.zeros((count, self.pages.shape[1]), dtype=np.int32)
        for i, t in enumerate(trajectories):
            how, made, row = t.sampling, len(t.tokens), start + i
            prompt = len(t.request.prompt)
            last = t.tokens[-1] if made else -1
            ints[:, i] = (
                last,
                prompt + made,
                prompt,
                prompt + how.max_tokens,
                t.slot,
                mix_seed(t.request.seed),
                how.top_k,
            )
            floats[:, i] = (how.temperature, how.top_p, how.min_p)
            stops[i, : len(how.stop_tokens)] = how.stop_tokens
            pages[i, : len(t.pages)] = t.pages
            self.context[row], self.prompt[row], self.slot[row] = prompt + made, prompt, t.slot
            self.held[row] = len(t.pages)
            self.greedy[row] = how.temperature <= 0
            self.truncates[row] = how.top_k > 0 or how.top_p < 1.0 or how.min_p > 0.0
            self.strings[row] = bool(how.stop_strings)
            if made:
                self.out_tokens[row, :made] = torch.from_numpy(t.tokens)
                self.out_logprobs[row, :made] = torch.from_numpy(t.logprobs)
            t.row = row
        end = start + count
        self.ints[:, start:end] = torch.from_numpy(ints)
        self.floats[:, start:end] = torch.from_numpy(floats)
        self.stops[start:end] = torch.from_numpy(stops)
        self.pages[start:end] = torch.from_numpy(pages)
        self.trajectories.extend(trajectories)

    def _reserve(self, tokens: int, stops: int) -> None:
        """Grow the outputs by doubling, and the table of stop tokens to the widest."""
        if tokens > self.out_tokens.shape[1]:
            width = max(tokens, 2 * self.out_tokens.shape[1]) - self.out_tokens.shape[1]
            self.out_tokens = torch.nn.functional.pad(self.out_tokens, (0, width))
            self.out_logprobs = torch.nn.functional.pad(self.out_logprobs, (0, width))
        if stops > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, stops - self.stops.shape[1]), value=-1)

    def lacking(self) -> list[Trajectory]:
        """The rows whose next token needs a page that they do not hold."""
        n = len(self.trajectories)
        lacking = np.nonzero(-(-self.context[:n] // PAGE) > self.held[:n])[0]
        return [self.trajectories[i] for i in lacking.tolist()]

    def grant(self, granted: Sequence[tuple[Trajectory, int]]) -> None:
        """Enter new pages into the page table, in one transfer."""
        rows = [t.row for t, _ in granted]
        columns = self.held[rows]
        self.held[rows] += 1
        where = (torch.tensor(rows, device=self.device), torch.from_numpy(columns).to(self.device))
        self.pages[where] = torch.tensor([p for _, p in granted], dtype=torch.int32, device=self.device)

    def sample(self, logits: Tensor) -> NDArray[np.bool_]:
        """Draw a token for every row from logits [rows, vocabulary].

        Returns [3, rows]: which rows end, which drew a stop token, and which had no distribution to draw from.
        """
        n = len(self.trajectories)
        ints, floats = self.ints, self.floats
        self._reserve(int((self.context[:n] - self.prompt[:n]).max()) + 1, 0)
        made = ints[CONTEXT, :n] - ints[PROMPT, :n]
        truncation = None
        if self.truncates[:n].any():
            truncation = (ints[TOP_K, :n], floats[TOP_P, :n], floats[MIN_P, :n])
        uniform = uniforms(ints[SEED, :n], made)
        any_greedy = bool(self.greedy[:n].any())
        tokens, logprobs = sample(logits, uniform, floats[TEMPERATURE, :n], truncation, any_greedy)
        place = made.add_(self._numbers[:n], alpha=self.out_tokens.shape[1])
        self.out_tokens.view(-1).index_copy_(0, place, tokens.int())
        self.out_logprobs.view(-1).index_copy_(0, place, logprobs)
        ints[TOKEN, :n] = tokens
        ints[CONTEXT, :n] += 1
        self.context[:n] += 1
        stopped = (tokens[:, None] == self.stops[:n]).any(1)
        ended = stopped | (ints[CONTEXT, :n] >= ints[LIMIT, :n])
        broken = logprobs.isnan()
        outcome: NDArray[np.bool_] = torch.stack((ended | broken, stopped, broken)).cpu().numpy()
        return outcome

    def output(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of a row's tokens and log-probabilities so far."""
        made = int(self.context[row] - self.prompt[row])
        return (
            self.out_tokens[row, :made].cpu().numpy().copy(),
            self.out_logprobs[row, :made].cpu().numpy().copy(),
        )

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
            self.ints[:, target] = self.ints[:, source]
            self.floats[:, target] = self.floats[:, source]
            for tensor in (self.stops, self.pages, self.out_tokens, self.out_logprobs):
                tensor[target] = tensor[source]
            for mirror in (self.context, self.prompt, self.slot, self.held, self.greedy, self.truncates, self.strings):
                mirror[holes] = mirror[movers]
        del self.trajectories[left:]
