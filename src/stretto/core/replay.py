"""Trained groups that may be used again while they are young enough, and which of them an update takes.

A group may be in the batch of any update up to its deadline, so its later uses obey the same bound as its first. The
choice is a function of what is kept: fewest uses first, then the newest version, then the lowest id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.core.ledger import Group, State


@dataclass(slots=True)
class Kept:
    """A group that was trained on."""

    id: int
    version: int
    deadline: int  # the last update whose batch may hold it
    trajectories: tuple[int, ...]  # those that were trained
    uses: int  # so far, the first included


class Replay:
    """What may be used again, and what is being used again. Empty where the plan replays nothing."""

    __slots__ = ("_most_uses", "_num_groups", "chosen", "kept")

    def __init__(self, num_groups: int, most_uses: int) -> None:
        self.kept: dict[int, Kept] = {}  # by group
        self.chosen: list[Kept] = []  # in the batch that is being trained on, by (version, id)
        self._num_groups = num_groups
        self._most_uses = most_uses

    def choose(self, update: int) -> int:
        """Choose the groups that the batch of `update` uses again; how many."""
        young = [each for each in self.kept.values() if each.deadline >= update]
        chosen = sorted(young, key=lambda each: (each.uses, -each.version, each.id))[: self._num_groups]
        self.chosen = sorted(chosen, key=lambda each: (each.version, each.id))
        return len(chosen)

    def members(self) -> tuple[tuple[int, int], ...]:
        """(trajectory, use) of what was chosen, ordered by (version, group, member)."""
        return tuple((trajectory, each.uses) for each in self.chosen for trajectory in each.trajectories)

    def trained(self, groups: Iterable[Group], next_update: int) -> tuple[int, ...]:
        """The batch of `groups`, and of what was chosen, has been trained on; the trajectories never used again.

        Called before the ledger forgets the groups, so that those that failed are still known.
        """
        for each in self.chosen:
            each.uses += 1
        self.chosen = []
        if self._num_groups:
            for group in groups:
                members = tuple(each.id for each in group.trajectories if each.state is not State.FAILED)
                self.kept[group.id] = Kept(group.id, group.version, group.deadline, members, 1)
        ended = [each for each in self.kept.values() if each.deadline < next_update or each.uses > self._most_uses]
        for each in ended:
            del self.kept[each.id]
        return tuple(trajectory for each in ended for trajectory in each.trajectories)

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take over what the journal tells. What was chosen is used again with the batch that is trained on again."""
        for each in record["kept"]:
            self.kept[each["id"]] = Kept(**{**each, "trajectories": tuple(each["trajectories"])})
        self.chosen = [self.kept[id] for id in record["chosen"]]
