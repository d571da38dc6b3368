"""What the instances hold and run, and what follows from that for one of them. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.core.messages import Load, Swap, Unload

if TYPE_CHECKING:
    from stretto.core.ledger import Trajectory

Hold = tuple[int, int]
"""(instance, version): an evaluation runs there under it."""


@dataclass(slots=True, eq=False)
class Instance:
    """What one instance holds and runs. A version is `loading` from the command on, `resident` once confirmed."""

    id: int
    slots: int
    resident: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)  # version -> trajectories, never 0
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # those that run here
    leaving: bool = False  # asked to go: takes nothing new
    crowded: bool = False  # short of KV memory, at the last survey

    @property
    def load(self) -> int:
        return len(self.trajectories)

    @property
    def free(self) -> int:
        return self.slots - len(self.resident) - len(self.loading)

    @property
    def awaits_newer(self) -> bool:
        """Whether it is about to have a version newer than all that it holds."""
        return bool(self.loading) and bool(self.resident) and max(self.loading) > max(self.resident)

    def apply(self, command: Load | Swap | Unload) -> None:
        """Record a command that was given. What a swap overwrites can take nothing new from then on."""
        if isinstance(command, Unload):
            self.resident.remove(command.version)
            return
        if isinstance(command, Swap):
            self.resident.remove(command.old)
        self.loading.add(command.version)


class Candidates:
    """Where new groups may go, by what the instances hold and run, best first.

    Instances below their share of `target` trajectories come first, so that one that has just loaded the newest version
    is not given everything; among those, the newest version, then the least loaded. Those that have their share, or are
    short of KV memory, come last, and only if no other is about to have a version for the rest. One that is about to
    have a newer version itself is left out until it has it: a group that starts now would be a version older for all of
    its life. So is one whose newest version is older than `oldest`: a group that starts there is due too soon.

    True of the moment that it is made, and as far as groups are started where it says and `started` is told.
    """

    def __init__(self, instances: Collection[Instance], target: int, oldest: int) -> None:
        self._instances = instances
        self._oldest = oldest
        self._share = -(-target // max(1, len(instances)))
        self._rank()

    def _rank(self) -> None:
        self._hopeful = any(each.loading and each.load < self._share for each in self._instances)
        ranked = []
        for each in self._instances:
            if each.resident and not each.awaits_newer and max(each.resident) >= self._oldest:
                full = each.load >= self._share or each.crowded
                if not (full and self._hopeful):
                    ranked.append((full, -max(each.resident), each.load, each.id, each))
        heapq.heapify(ranked)  # ids are unique: instances themselves are never compared
        self._ranked = ranked

    def best(self, allows: Callable[[int], bool]) -> tuple[Instance, int] | None:
        """The best place, and the version that a group gets there; what is refused once is not offered again."""
        refused = -1
        while self._ranked:
            _, version, _, _, instance = self._ranked[0]
            if -version > refused:
                if allows(-version):
                    return instance, -version
                refused = -version
            heapq.heappop(self._ranked)
        return None

    def started(self) -> None:
        """A group has started where `best` said last."""
        _, version, _, id, instance = self._ranked[0]
        full = instance.load >= self._share or instance.crowded
        if instance.loading:
            self._rank()  # it may have been the one that the others waited for
        elif full and self._hopeful:
            heapq.heappop(self._ranked)
        else:
            heapq.heapreplace(self._ranked, (full, version, instance.load, id, instance))

    def __iter__(self) -> Iterator[tuple[Instance, int]]:
        """All places with their versions, best first."""
        return iter([(instance, -version) for _, version, _, _, instance in sorted(self._ranked)])


def stranded(instances: Collection[Instance], versions: Iterable[int]) -> list[int]:
    """Those of `versions` that no instance holds or is loading."""
    return [
        version
        for version in versions
        if not any(version in each.resident or version in each.loading for each in instances)
    ]


def place_in_one_slot(instances: Iterable[Instance], newest: int, hold: Hold | None) -> list[Load | Swap | Unload]:
    """What to do where work goes on under new weights: overwrite each instance's one version by the newest.

    An instance that is still loading is swapped when it has confirmed; one that evaluates, when that has ended.
    """
    commands: list[Load | Swap | Unload] = []
    for each in instances:
        if each.loading:
            continue
        if not each.resident:
            commands.append(Load(each.id, newest))
            continue
        (old,) = each.resident
        if old != newest and hold != (each.id, old):
            commands.append(Swap(each.id, old, newest))
    return commands


def evictable(instance: Instance, hold: Hold | None) -> list[int]:
    """What may be unloaded from an instance if its slot is wanted, oldest first."""
    return sorted(
        version for version in instance.resident if version not in instance.running and hold != (instance.id, version)
    )
