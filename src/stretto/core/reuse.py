"""Keeps trained groups that may be used again, and chooses those that an update uses again.

A group may be in the batch of any update up to its deadline, so its later uses obey the same bound as its first. Groups
are chosen by fewest uses, then by newest version, then by lowest id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stretto.core.ledger import Group, TrajectoryState


@dataclass(frozen=True, slots=True)
class ReusableGroup:
    """A group that was trained, and may be used again."""

    id: int
    version: int
    deadline: int  # the last update whose batch may hold it
    trajectories: tuple[int, ...]  # those that were trained
    uses: int  # so far, including the first


class ReuseBuffer:
    """The groups that may be used again, and those that are being used again. Empty if the plan reuses nothing."""

    __slots__ = ("_most_uses", "_num_groups", "chosen", "kept")

    def __init__(self, num_groups: int, most_uses: int) -> None:
        self.kept: dict[int, ReusableGroup] = {}  # by group
        self.chosen: list[ReusableGroup] = []  # in the batch that is in training, by (version, id)
        self._num_groups = num_groups
        self._most_uses = most_uses

    def choose(self, update: int) -> int:
        """Chooses the groups that the batch of `update` uses again. Returns their number."""
        young = [each for each in self.kept.values() if each.deadline >= update]
        chosen = sorted(young, key=lambda each: (each.uses, -each.version, each.id))[: self._num_groups]
        self.chosen = sorted(chosen, key=lambda each: (each.version, each.id))
        return len(chosen)

    def members(self) -> tuple[tuple[int, int], ...]:
        """Returns (trajectory, use) of the chosen groups, by (version, group, member)."""
        return tuple((trajectory, each.uses) for each in self.chosen for trajectory in each.trajectories)

    def trained(self, groups: Iterable[Group], next_update: int) -> tuple[int, ...]:
        """Records that `groups` and the chosen groups have been trained. Returns the trajectories never used again.

        Called before the ledger forgets the groups, because trajectories that ended before have to be left out.
        """
        for each in self.chosen:
            self.kept[each.id] = replace(each, uses=each.uses + 1)
        self.chosen = []
        if self._num_groups:
            for group in groups:
                members = tuple(each.id for each in group.trajectories if each.state is TrajectoryState.TRAINING)
                self.kept[group.id] = ReusableGroup(group.id, group.version, group.deadline, members, 1)
        ended = [each for each in self.kept.values() if each.deadline < next_update or each.uses > self._most_uses]
        for each in ended:
            del self.kept[each.id]
        return tuple(trajectory for each in ended for trajectory in each.trajectories)

    def restore(self, kept: Iterable[ReusableGroup], chosen: Iterable[int]) -> None:
        """Restores the groups of a snapshot. The batch that is trained again uses the groups `chosen` again."""
        self.kept = {each.id: each for each in kept}
        self.chosen = [self.kept[id] for id in chosen]
