"""Which row of a data set comes next, where that follows from how often each was solved.

A row is drawn with a probability in proportion to `FLOOR + 1 - rate`, where its rate is what it was scored of late: the
mean of its rewards as shares of the reward that counts as solved, halved in weight whenever the row is drawn again. A
row that was never scored counts as never solved.

A draw follows from the seed, its position in the stream, what was drawn before it, and what was scored before the last
batch was taken. What is scored since counts from the next batch on, in an order of its own: which completion of a batch
was scored first decides nothing, so that a synchronous run is the same run twice, and whoever has the history can draw
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stretto.errors import RecipeError

FLOOR = 0.1  # against 1 for a row that is never solved: what is solved always is still looked at now and then
DECAY = 0.5  # of what was known of a row, when it is drawn again


@dataclass(frozen=True, slots=True)
class Draw:
    """A row of the data set, and why it was drawn."""

    row_number: int
    epoch: int | None  # None: rows come as often as their priority has it
    reason: str


class PassRates:
    """How often each row was solved of late, and draws by that. Not thread-safe."""

    def __init__(self, num_rows: int, *, seed: int, pass_reward: float = 1.0) -> None:
        if not (math.isfinite(pass_reward) and pass_reward > 0):
            raise RecipeError(f"`task.pass_reward = {pass_reward}` must be a number above 0")
        self._seed = seed
        self._pass_reward = pass_reward
        self._solved = np.zeros(num_rows)  # decayed sums over the trajectories of a row
        self._scored = np.zeros(num_rows)
        self._waiting: list[tuple[int, float]] = []  # (row, share of the reward), since the last batch was taken
        self._settled = -1  # the last update whose batch was taken

    def draw(self, index: int) -> Draw:
        """The row of position `index`, by what is known now. Each position is drawn once, in order."""
        rates = np.divide(self._solved, self._scored, out=np.zeros_like(self._solved), where=self._scored > 0)
        ends = np.cumsum(FLOOR + 1.0 - rates)
        spot = np.random.default_rng([self._seed, index]).random() * ends[-1]
        row = min(int(np.searchsorted(ends, spot, side="right")), len(ends) - 1)
        known = f"pass rate {rates[row]:.4f}" if self._scored[row] > 0 else "not scored yet"
        share = (FLOOR + 1.0 - rates[row]) / ends[-1]
        self.drawn(row)
        return Draw(row, None, f"{known}, drawn with probability {share:.3g}")

    def drawn(self, row_number: int) -> None:
        """A row was drawn: what was known of it counts less from now on."""
        self._solved[row_number] *= DECAY
        self._scored[row_number] *= DECAY

    def scored(self, row_number: int, reward: float) -> None:
        """A trajectory of a row has its reward."""
        self._waiting.append((row_number, min(1.0, max(0.0, reward / self._pass_reward))))

    def settle(self, update: int) -> None:
        """The batch of an update was taken: what was scored until now counts. A second time changes nothing."""
        if update <= self._settled:
            return
        self._settled = update
        for row, share in sorted(self._waiting):  # sums of floats are those of one order
            self._solved[row] += share
            self._scored[row] += 1.0
        self._waiting.clear()
