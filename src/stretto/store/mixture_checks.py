"""The checks of `verify` on runs of several tasks: each group is of the task that lacked most when it was admitted.

The shares are those of the recipe of each phase. The rule is written down here a second time, apart from
`environments/task_shares.py`: a task counts the groups that were admitted for it and not lost before, at least
`admitted / oversample`, and the next group goes to the task with the largest `share * (N + 1) - counted`.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from stretto.store.phase_checks import PhaseRow

Weights = tuple[tuple[str, Fraction, Fraction | None], ...]  # label, share, oversample


@dataclass(slots=True)
class _Counts:
    """The groups since the shares last changed."""

    weights: Weights
    admitted: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def lacking_most(self) -> str:
        counted = {label: self._counted(label, bound) for label, _, bound in self.weights}
        total, every = sum(counted.values()) + 1, sum(share for _, share, _ in self.weights)
        best, most = "", None
        for label, share, _ in self.weights:
            lacks = share / every * total - counted[label]
            if most is None or lacks > most:
                best, most = label, lacks
        return best

    def _counted(self, label: str, bound: Fraction | None) -> Fraction:
        admitted = self.admitted.get(label, 0)
        kept = Fraction(admitted - self.lost.get(label, 0))
        return kept if bound is None else max(kept, Fraction(admitted) / bound)


def mixture_breaks(db: sqlite3.Connection, phases: Sequence[PhaseRow]) -> Iterator[str]:
    """Returns the groups whose task does not follow from the shares, a sentence each. The first ends the search."""
    changes = [(each.first_group, weights) for each in phases if (weights := weights_of(each.recipe)) is not None]
    if not changes:
        return
    counts = _Counts(changes[0][1])
    since = 0
    lost = deque(db.execute("SELECT lost_before, group_id, task FROM groups WHERE lost_before NOTNULL ORDER BY 1, 2"))
    for group, task in db.execute("SELECT group_id, task FROM groups ORDER BY group_id"):
        while changes and changes[0][0] <= group:
            if (weights := changes.pop(0)[1]) != counts.weights:
                counts, since = _Counts(weights), group
        while lost and lost[0][0] <= group:
            _, which, label = lost.popleft()
            if which >= since:
                counts.lost[label] = counts.lost.get(label, 0) + 1
        if task not in {label for label, _, _ in counts.weights}:
            yield f"group {group} is of task {task!r}, which the recipe of its phase does not have"
            return
        if (expected := counts.lacking_most()) != task:
            yield f"group {group} is of task {task!r}, and by the shares of its phase {expected!r} was next"
            return
        counts.admitted[task] = counts.admitted.get(task, 0) + 1


def weights_of(recipe: Mapping[str, Any] | None) -> Weights | None:
    """Returns the shares of the tasks of a recipe; None if it has one table `[task]`, or cannot be read."""
    tasks = None if recipe is None else recipe.get("task")
    if not isinstance(tasks, list) or not all(isinstance(each, dict) for each in tasks):
        return None
    try:
        return tuple(
            (
                str(each["label"]),
                Fraction(repr(float(each.get("share", 1.0)))),
                None if "oversample" not in each else Fraction(repr(float(each["oversample"]))),
            )
            for each in tasks
        )
    except (KeyError, TypeError, ValueError):
        return None


def realised_shares(db: sqlite3.Connection) -> list[tuple[str, int, float]]:
    """Returns label, number and share of the groups of each task that was trained; empty if tasks have no labels."""
    rows = db.execute(
        "SELECT task, COUNT(DISTINCT group_id) FROM members JOIN trajectories USING (trajectory) "
        "JOIN groups USING (group_id) JOIN updates USING (update_id) WHERE use = 0 AND finished_at NOTNULL "
        "AND task NOTNULL GROUP BY task ORDER BY MIN(group_id)"
    ).fetchall()
    total = sum(count for _, count in rows)
    return [(str(label), int(count), count / total) for label, count in rows]
