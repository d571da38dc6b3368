"""Decides when a group may start and which groups make a batch: earliest deadline first. Pure functions.

`outstanding` and `finished` map a deadline to the number of groups that have it. Outstanding groups are admitted and
not yet taken into a batch; finished groups are among them. `next_update` is the next update whose batch is not yet
taken.

The invariant: no deadline lies before `next_update`, and for every `d` from there on
`outstanding(deadline <= d) <= batch * (d - next_update + 1)`. Admission keeps it, and so does taking a batch that
`batch_ready` allows. While it holds, `batch` finished groups are always a ready batch if no group is unfinished. So no
group is trained late and nothing waits for ever. Only deadlines that occur have to be checked: between two of them the
left side does not change, and the right side grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def invariant_holds(outstanding: Mapping[int, int], next_update: int, batch: int) -> bool:
    """Returns True if all outstanding groups can still be trained in time."""
    total = 0
    for deadline in sorted(outstanding):
        total += outstanding[deadline]
        if deadline < next_update or total > batch * (deadline - next_update + 1):
            return False
    return True


def room(outstanding: Mapping[int, int], deadline: int, next_update: int, batch: int) -> int:
    """Returns the number of groups of this deadline that the invariant still allows."""
    if deadline < next_update:
        return 0
    total = sum(count for due, count in outstanding.items() if due <= deadline)
    left = batch * (deadline - next_update + 1) - total
    for due in sorted(due for due in outstanding if due > deadline):
        total += outstanding[due]
        left = min(left, batch * (due - next_update + 1) - total)
    return max(0, left)


def admits(outstanding: Mapping[int, int], deadline: int, next_update: int, batch: int) -> bool:
    """Returns True if the invariant still holds with one more group of this deadline.

    A later deadline faces fewer conditions: if a version is refused, so is every older one.
    """
    return room(outstanding, deadline, next_update, batch) > 0


def waited_deadline(
    outstanding: Mapping[int, int], finished: Mapping[int, int], next_update: int, batch: int
) -> int | None:
    """Returns the latest deadline of unfinished groups that must finish before a batch may be taken; None if none must.

    A batch of the `batch` earliest finished groups must leave at most `batch * (d - next_update)` groups due by `d`.
    """
    left = done = 0
    waited = None
    for deadline in sorted(outstanding):
        left += outstanding[deadline]
        done += finished.get(deadline, 0)
        if left - min(batch, done) > batch * (deadline - next_update):
            waited = deadline
    return waited


def batch_ready(outstanding: Mapping[int, int], finished: Mapping[int, int], next_update: int, batch: int) -> bool:
    """Returns True if the `batch` finished groups of the earliest deadlines may be taken now."""
    return sum(finished.values()) >= batch and waited_deadline(outstanding, finished, next_update, batch) is None


def wanted_staleness(tail_s: float, update_s: float, cap: int) -> int:
    """Returns the K with which the trainer never waits for a tail of `tail_s` seconds, at most `cap`."""
    if not (tail_s >= 0 and update_s >= 0):
        raise ValueError(f"`tail_s` is {tail_s} and `update_s` is {update_s}; both must be at least 0")
    if tail_s == 0:
        return min(cap, 1)
    if update_s == 0 or tail_s / update_s >= cap:
        return cap
    return min(cap, math.ceil(tail_s / update_s) + 1)


def lowest_staleness(
    outstanding_of_version: Mapping[int, int], wanted: int, current: int, next_update: int, batch: int
) -> int:
    """Returns the smallest K from `wanted` to `current` with which all outstanding groups could have been admitted.

    So K stays if `in_flight` lets the outstanding groups fill every batch that `current` allows.
    """
    for staleness in range(wanted, current):
        deadlines = {version + staleness: count for version, count in outstanding_of_version.items()}
        if invariant_holds(deadlines, next_update, batch):
            return staleness
    return current
