"""The trend of the reward, which tells a run that learns from one that does not. Pure: metrics of updates in.

| outlook   | means                                                                                                    |
|-----------|----------------------------------------------------------------------------------------------------------|
| `unknown` | there are fewer than `2 * LEAST` updates                                                                 |
| `learnt`  | the mean reward of recent updates is near the best of the run, and has risen since its first updates by  |
|           | `LEARNT` times the spread of the rewards in a batch or more                                              |
| `rising`  | it is `CLEAR` standard errors or more above that of the updates before                                   |
| `flat`    | none of these                                                                                            |

Recent updates are the last `RECENT`, or half of all updates at the beginning of a run. They are compared with up to
`PAST` updates before them. The standard error is that of the difference of two means with unequal variances. `learnt`
holds for a task that is solved, whose reward cannot rise any more; it compares a run with its own beginning, because
nobody knows the highest reward of a task.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RECENT = 5  # updates that stand for the present
PAST = 20  # updates before them that they are compared with
LEAST = 3  # updates on each side of a comparison, and those that are the beginning of a run
CLEAR = 3.0  # standard errors; noise alone reaches it in about one update of a hundred
LEARNT = 4.0  # times the standard deviation of the rewards of a batch
NEAR = 0.1  # share of the rise to the best, by which the present may be below it

Outlook = Literal["unknown", "rising", "learnt", "flat"]


@dataclass(slots=True)
class RewardTrend:
    """The rewards of a run that its outlook depends on, of bounded size."""

    _first: list[float] = field(default_factory=list)
    _last: list[tuple[float, float]] = field(default_factory=list)  # mean and standard deviation of each update
    _best: float = -math.inf  # the highest mean of recent updates so far

    def add(self, line: Mapping[str, Any]) -> Outlook:
        """Adds the line of an update and returns the outlook. A line without a finite reward changes nothing."""
        reward, deviation = line.get("reward_mean", math.nan), line.get("reward_std", math.inf)
        if not math.isfinite(reward):
            return "flat"
        if len(self._first) < LEAST:
            self._first.append(reward)
        self._last = [*self._last, (reward, deviation)][-(RECENT + PAST) :]
        count = min(RECENT, len(self._last) // 2)
        if count < LEAST:
            return "unknown"
        now, before = [mean for mean, _ in self._last[-count:]], [mean for mean, _ in self._last[:-count]]
        self._best = max(self._best, statistics.fmean(now))
        if self._is_learnt(statistics.fmean(now), count):
            return "learnt"
        return "rising" if _rises(before, now) else "flat"

    def _is_learnt(self, now: float, count: int) -> bool:
        began = statistics.fmean(self._first)
        spread = statistics.median(deviation for _, deviation in self._last[-count:])
        return now > began and now - began >= LEARNT * spread and self._best - now <= NEAR * (self._best - began)


def _rises(before: list[float], now: list[float]) -> bool:
    """True if the mean of `now` is clearly above that of `before`."""
    rise = statistics.fmean(now) - statistics.fmean(before)
    error = math.sqrt(statistics.variance(now) / len(now) + statistics.variance(before) / len(before))
    return rise > 0 and rise >= CLEAR * error
