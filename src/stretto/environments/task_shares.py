"""Assigns the groups of a run to its tasks, so that each task has its share of what is trained.

The next group goes to the task that lacks most: the one with the largest `share * (N + 1) - counted`, where `N` is the
sum of `counted` over all tasks; the first in the recipe if several lack the same. A task counts the groups that were
drawn for it and not lost. A group is lost if it is filtered, dropped, or has no trajectory that did not fail. So a lost
group is replaced by one of the same task, and the shares of trained groups hold however many groups a task loses.

With `oversample = f`, a task counts at least `drawn / f`: it draws at most `f` groups for each that its share asks for,
and what it lacks beyond that goes to the others.

Nothing is random, and numbers are fractions: the same draws and losses in the same order give the same tasks on every
machine. Let `k` be the number of tasks. After every draw without losses, `counted` is less than 1 above its share and
less than `k - 1` below; of two tasks, it is within 1/2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a task in the groups of a run, relative to the parts of the others."""

    weight: float  # above 0
    oversample: float | None = None  # at least 1; None: no bound


@dataclass(slots=True)
class _Count:
    share: Fraction  # of all groups
    oversample: Fraction | None
    drawn: int = 0
    lost: int = 0

    @property
    def counted(self) -> Fraction:
        kept = Fraction(self.drawn - self.lost)
        return kept if self.oversample is None else max(kept, self.drawn / self.oversample)


class TaskShares:
    """Counts the groups of each task, and names the task of the next. Not thread-safe."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        weights = {label: exact(share.weight) for label, share in shares.items()}
        total = sum(weights.values())
        self._counts = {
            label: _Count(weights[label] / total, None if share.oversample is None else exact(share.oversample))
            for label, share in shares.items()
        }

    @property
    def labels(self) -> Iterable[str]:
        return self._counts.keys()

    def next(self) -> str:
        """Returns the task that lacks most. Changes nothing."""
        after = sum((each.counted for each in self._counts.values()), start=Fraction(1))
        lacks = {label: each.share * after - each.counted for label, each in self._counts.items()}
        return max(lacks, key=lambda label: lacks[label])  # the first of several

    def drawn(self, label: str) -> None:
        """Counts a group that was drawn for a task."""
        self._counts[label].drawn += 1

    def lost(self, label: str) -> None:
        """Counts a group of a task that was drawn and will not be trained."""
        self._counts[label].lost += 1

    def described(self, label: str) -> str:
        """Says in words why a task is drawn now."""
        own = self._counts[label]
        everything = sum(each.drawn - each.lost for each in self._counts.values())
        return f"{own.drawn - own.lost} of {everything} groups so far, its share is {float(own.share):.4g}"


def exact(value: float) -> Fraction:
    """Returns a number as its decimals say: 0.7 is 7/10."""
    return Fraction(repr(float(value)))
