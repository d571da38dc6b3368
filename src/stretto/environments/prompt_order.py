"""Draws the rows of a data set by their pass rates: rows that are rarely solved come more often.

A row is drawn with a probability proportional to `FLOOR + 1 - rate`. The rate is the mean of the row's recent rewards,
as shares of the reward that counts as solved; the weight of old rewards is halved each time the row is drawn. A row
without rewards has rate 0.

A draw is a function of the seed, its position in the stream, the earlier draws, and the rewards before the last batch
was taken. Later rewards count from the next batch on, in sorted order, so the order in which completions of a batch
were scored does not matter. So a synchronous run is reproducible, and a resumed run repeats the draws from its journal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.errors import RecipeError

FLOOR = 0.1  # the weight of a row that is always solved (never solved: 1.1), so that it is still drawn now and then
DECAY = 0.5  # the factor for a row's old rewards when it is drawn again


@dataclass(frozen=True, slots=True)
class Draw:
    """A row of the data set, and the reason of the draw."""

    row_number: int
    epoch: int | None  # None: rows are drawn by pass rate, not in epochs
    reason: str
    task: str | None = None  # its label, if the run has several
    place: int | None = None  # among the draws of its task, from 0; None: among all of them


class PassRates:
    """Keeps each row's recent pass rate and draws rows by it. Not thread-safe."""

    def __init__(self, num_rows: int, *, seed: int, pass_reward: float = 1.0) -> None:
        if not (math.isfinite(pass_reward) and pass_reward > 0):
            raise RecipeError(f"`task.pass_reward = {pass_reward}` must be a number above 0")
        self._seed = seed
        self._pass_reward = pass_reward
        self._solved = np.zeros(num_rows)  # decayed sums over the trajectories of a row
        self._scored = np.zeros(num_rows)
        self._waiting: list[tuple[int, float]] = []  # (row, share of the reward), since the last batch was taken
        self._settled = -1  # the last update whose batch was taken
        self._drawable = np.ones(num_rows)  # 0: the row is never drawn
        self._last = num_rows - 1  # that may be drawn

    def draw(self, index: int) -> Draw:
        """Draws the row of position `index` with the current rates. Each position is drawn once, in order."""
        rates = np.divide(self._solved, self._scored, out=np.zeros_like(self._solved), where=self._scored > 0)
        ends = np.cumsum((FLOOR + 1.0 - rates) * self._drawable)
        spot = np.random.default_rng([self._seed, index]).random() * ends[-1]
        row = min(int(np.searchsorted(ends, spot, side="right")), self._last)
        known = f"pass rate {rates[row]:.4f}" if self._scored[row] > 0 else "not scored yet"
        share = (FLOOR + 1.0 - rates[row]) / ends[-1]
        self.drawn(row)
        return Draw(row, None, f"{known}, drawn with probability {share:.3g}")

    def leave_out(self, rows: Sequence[int]) -> None:
        """Notes rows that are never drawn. One row at least is left."""
        self._drawable[list(rows)] = 0.0
        self._last = int(np.flatnonzero(self._drawable)[-1])

    def drawn(self, row_number: int) -> None:
        """Notes that a row was drawn: its old rewards count less from now on."""
        self._solved[row_number] *= DECAY
        self._scored[row_number] *= DECAY

    def scored(self, row_number: int, reward: float) -> None:
        """Notes the reward of a trajectory of a row."""
        self._waiting.append((row_number, min(1.0, max(0.0, reward / self._pass_reward))))

    def settle(self, update: int) -> None:
        """Notes that the batch of an update was taken: rewards until now count. A second call changes nothing."""
        if update <= self._settled:
            return
        self._settled = update
        for row, share in sorted(self._waiting):  # a sum of floats depends on the order
            self._solved[row] += share
            self._scored[row] += 1.0
        self._waiting.clear()
