"""Decides which outstanding groups are in reserve, where a run starts more work than it trains on. Pure functions.

With `rollout.redundancy`, `M >= G` members of a group are started, and up to `R` groups more than the batches need. The
first to finish win; the others end as `dropped`. This gives up law 2 at the recipe's wish, and no other law.

*Members.* A group is finished as soon as `G` of its members have rewards. Those that have none by then are its surplus,
and are dropped at once. If so many members fail that `G` rewards are out of reach, it is finished with those that it
gets, as without redundancy. All members share one version.

*Groups.* Every outstanding group is either *due* or *in reserve*.

- A due group has a deadline. The invariant of `admission.py`, with the same `B`, is about due groups alone. So `B` due
  groups for each update carry deadlines, `in_flight` bounds due groups, and none of them is ever dropped.
- A group in reserve has no deadline: no batch waits for it, and it is in no batch. At most `R` groups are in reserve at
  once. It has a *limit* instead, the number that would be its deadline: `d = w + K`.

*Start.* A group starts as due if the rules allow that. If they do not, and fewer than `R` groups are in reserve, it
starts in reserve, provided that its limit does not lie before the next update. So with `K = 0` nothing starts while an
update trains, with or without redundancy.

*A finished group in reserve takes the place of a due one.* Let its limit be `d`.

- If due groups are unfinished, it becomes due, and the unfinished one with the earliest deadline `e` goes into reserve
  in its place. If `e <= d`, the invariant holds afterwards: no number of groups that are due by some update grows. If
  `e > d`, this is done only if the invariant still holds.
- If all due groups are finished (or the exchange is refused), it becomes due as one more group, if `in_flight`, the
  updates that are left and the invariant allow that.

This is tried when it finishes, when a due group is filtered or replaced, and after every batch. So a group that went
into reserve because it was slow is trained after all if it finishes in time.

*End.* After the batch of update `n` is taken, every group in reserve with a limit of `n` or earlier is dropped,
finished or not, and after the last batch all of them are. A group that is trained was due, so its deadline had not
passed: law 3 holds without exception. If a publish waits until nothing runs (`drain`), it waits for due groups alone,
and drops what runs in reserve.

A due group is never dropped, and nothing waits for a group in reserve. So the argument of `controller.py` against
deadlocks holds as it stands.

*After a restart* the journal tells which groups are outstanding, and not which of them were in reserve. Sets of groups
that satisfy the invariant are the independent sets of a matroid (unit jobs with deadlines). So taking groups greedily,
in any order, leaves out the fewest that can be left out, which are at most `R`. `reserve_after_restart` takes finished
groups first, and then the latest deadlines: the trainer waits for none that it would not have waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stretto.core import admission


class Outstanding(NamedTuple):
    """An outstanding group: what its place depends on."""

    id: int
    deadline: int  # its limit, if it is in reserve
    finished: bool


def may_exchange(due_at: Mapping[int, int], enters: int, leaves: int, next_update: int, batch: int) -> bool:
    """Returns True if a group with the deadline `enters` may take the place of a due group with the deadline `leaves`.

    `due_at` maps a deadline to the number of due groups that have it.
    """
    if enters < next_update:
        return False
    if leaves <= enters:
        return True
    without = dict(due_at)
    without[leaves] -= 1
    return admission.admits(without, enters, next_update, batch)


def reserve_after_restart(groups: Iterable[Outstanding], next_update: int, batch: int, most_due: int) -> frozenset[int]:
    """Returns the groups that are in reserve, of all that are outstanding in a run that is restored."""
    due_at: dict[int, int] = {}
    num_due, reserve = 0, set[int]()
    for each in sorted(groups, key=_preference):
        if num_due < most_due and admission.admits(due_at, each.deadline, next_update, batch):
            due_at[each.deadline] = due_at.get(each.deadline, 0) + 1
            num_due += 1
        else:
            reserve.add(each.id)
    return frozenset(reserve)


def _preference(group: Outstanding) -> tuple[bool, int, int]:
    return (not group.finished, group.deadline if group.finished else -group.deadline, group.id)
