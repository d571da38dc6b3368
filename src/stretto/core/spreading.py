"""Decides over how many instances the members of a new group are spread. A pure function of loads and measured costs.

The members of a group share the KV of their prompt on an instance. So a group on one instance is prefilled once, and a
group on `j` instances `j` times. But on one instance its rows are beside one another: each slows the others down, and
as answers to one prompt are of similar lengths, they stay together to their ends. Spreading (ROLL Flash calls it prompt
replication) gives each instance fewer of them.

The cost of a placement is the time that rows lose by it, in row-seconds. Let an instance have `r` rows, and get `k`
members of the group.

- *Prefill.* It takes `p` seconds, in which the `r` rows and the `k` members wait: `(r + k) * p`.
- *Rows beside one another.* A decode step takes `s` seconds longer for each row, for all rows. Members decode `L`
  steps. The rows slow down one another in pairs, so the members cost `((r + k) * (r + k - 1) - r * (r - 1)) * s * L`.

Both grow with `r`, so the best `j` instances are the `j` with the least load, and the best division of the members
makes their loads as equal as possible. Loads are compared over the paces of the instances (`paces.py`). All `j` up to
the number of members are compared. On a tie, the fewest instances win: they need less KV memory. Instances that are
short of KV memory are not offered. Those that are loading the version of the group are; if one of them is chosen, the
group starts when it has the version (`scheduling.py`).

`p` is for a prompt of the mean length, at the measured rate of prefilling; `s` is the measured slope of a step's time
over its rows; `L` is the mean length of completions so far. Before all of them are measured, a group stays whole. On an
engine whose step takes equally long for any number of rows, `s` is 0 and groups stay whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Spread = Literal["auto", "never", "always"]
"""`auto`: by cost. `never`: a group starts on one instance. `always`: on as many instances as it has members."""


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Measured costs of starting a group."""

    prefill_s: float  # of one prompt
    row_s: float  # that a decode step takes longer with one more row

    def __post_init__(self) -> None:
        for name in ("prefill_s", "row_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 0")


def division(
    loads: Sequence[int],
    members: int,
    spread: Spread,
    costs: GroupCosts | None,
    length: float,
    paces: Sequence[float] = (),
) -> list[int]:
    """Returns how many members of a group start on each of the first instances.

    `loads` are the rows of the instances that could take the group; there is at least one. `paces` are those of the
    instances, 1 by default, and `(load + 1) / pace` is ascending. `length` is the mean number of tokens of a
    completion, 0 if it is not known.
    """
    most = min(len(loads), members)
    if spread == "always":
        return _level(loads[:most], members, paces)
    if spread == "never" or most == 1 or costs is None or not length:
        return [members]
    per_pair = costs.row_s * length
    best, least = [members], _cost(loads[:1], [members], costs.prefill_s, per_pair)
    for num in range(2, most + 1):
        counts = _level(loads[:num], members, paces)
        if len(counts) < num:
            break  # the loads of the others are so much higher that they would get none
        cost = _cost(loads, counts, costs.prefill_s, per_pair)
        if cost < least:
            best, least = counts, cost
    return best


def _cost(loads: Sequence[int], counts: Sequence[int], prefill_s: float, per_pair: float) -> float:
    total = 0.0
    for rows, count in zip(loads, counts, strict=False):
        after = rows + count
        total += after * prefill_s + (after * (after - 1) - rows * (rows - 1)) * per_pair
    return total


def _level(loads: Sequence[int], members: int, paces: Sequence[float] = ()) -> list[int]:
    """Returns how many members each instance gets if the loads become as equal as possible. The last may get none.

    If the paces differ, it is the loads over the paces that become equal.
    """
    if any(pace != 1.0 for pace in paces):
        return _level_by_pace(loads, members, paces)
    num, total = 1, loads[0] + members
    while num < len(loads) and total + loads[num] > loads[num] * (num + 1):
        total += loads[num]
        num += 1
    level, above = divmod(total, num)
    counts = [level + (index < above) - load for index, load in enumerate(loads[:num])]
    return [count for count in counts if count]


def _level_by_pace(loads: Sequence[int], members: int, paces: Sequence[float]) -> list[int]:
    """Does the same member by member: each goes where the load with it, over the pace, is least."""
    counts = [0] * len(loads)
    queue = [((load + 1) / pace, place) for place, (load, pace) in enumerate(zip(loads, paces, strict=False))]
    heapq.heapify(queue)
    for _ in range(members):
        _, place = queue[0]
        counts[place] += 1
        heapq.heapreplace(queue, ((loads[place] + counts[place] + 1) / paces[place], place))
    return [count for count in counts if count]
