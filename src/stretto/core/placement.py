"""Which instance does what, decided from what the instances hold and run. Pure functions.

Why this never deadlocks: a trajectory that waits for an instance resumes at once where its version is resident, so one
that still waits has its version on no instance. Such *stranded* versions get the first free slots, earliest deadline
first, and while one of them has no slot nothing new is admitted, so that what runs comes to its end and frees one. A
version is only ever evicted where nothing runs under it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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


def candidates(instances: Collection[Instance], target: int) -> list[tuple[Instance, int]]:
    """Where a new group may go, with the newest version resident there, best first.

    Instances below their share of `target` trajectories come first, so that one that has just loaded the newest version
    is not given everything; among those, the newest version, then the least loaded. Those that have their share come
    last, and only if no other is about to have a version for the rest. One that is about to have a newer version itself
    is left out until it has it: a group that starts now would be a version older for all of its life.
    """
    share = -(-target // max(1, len(instances)))
    hopeful = any(instance.loading and instance.load < share for instance in instances)
    ranked = [
        (instance.load >= share, -max(instance.resident), instance.load, instance.id, instance)
        for instance in instances
        if instance.resident and not instance.awaits_newer and (instance.load < share or not hopeful)
    ]
    ranked.sort()  # ids are unique: instances themselves are never compared
    return [(instance, -version) for _, version, _, _, instance in ranked]


def resuming_instance(instances: Iterable[Instance], version: int | None) -> Instance | None:
    """Where a trajectory goes on: the least loaded instance that holds `version`.

    None for the version means any: the newest that is resident somewhere.
    """
    if version is None:
        holders = [instance for instance in instances if instance.resident]
        return min(holders, key=lambda each: (-max(each.resident), each.load, each.id), default=None)
    holders = [instance for instance in instances if version in instance.resident]
    return min(holders, key=lambda each: (each.load, each.id), default=None)


def stranded(instances: Collection[Instance], versions: Iterable[int]) -> list[int]:
    """Those of `versions` that no instance holds or is loading."""
    return [
        version
        for version in versions
        if not any(version in each.resident or version in each.loading for each in instances)
    ]


def place(
    instances: Collection[Instance], waiting: Sequence[int], newest: int, hold: Hold | None
) -> list[Load | Swap | Unload]:
    """What to load and unload where versions are pinned: first the stranded versions, then the newest everywhere.

    `waiting` are stranded versions, most urgent first. One for which there is no slot is left out; the newest version
    gives way to a stranded one where nothing runs under it.
    """
    commands: list[Load | Swap | Unload] = []
    free = {each.id: each.free for each in instances}
    idle = {each.id: _evictable(each, hold) for each in instances}

    def load(instance: Instance, version: int) -> None:
        if free[instance.id] > 0:
            free[instance.id] -= 1
        else:
            commands.append(Unload(instance.id, idle[instance.id].pop(0)))
        commands.append(Load(instance.id, version))

    for version in waiting:
        roomy = [each for each in instances if free[each.id] > 0 or idle[each.id]]
        if not roomy:
            break
        best = min(roomy, key=lambda each: (-free[each.id], idle[each.id][:1] == [newest], each.load, each.id))
        load(best, version)
    loading = {command.instance for command in commands if isinstance(command, Load) and command.version == newest}
    for each in instances:
        if newest in each.resident or newest in each.loading or each.id in loading:
            continue
        if free[each.id] > 0 or idle[each.id]:
            load(each, newest)
    return commands


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


def _evictable(instance: Instance, hold: Hold | None) -> list[int]:
    """What may be unloaded from an instance if its slot is wanted, oldest first."""
    return sorted(
        version for version in instance.resident if version not in instance.running and hold != (instance.id, version)
    )
