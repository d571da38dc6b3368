"""What the instances hold and run, and what follows from that for one of them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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


def candidates(instances: Collection[Instance], target: int, oldest: int) -> list[tuple[Instance, int]]:
    """Where a new group may go, with the newest version resident there, best first.

    Instances below their share of `target` trajectories come first, so that one that has just loaded the newest version
    is not given everything; among those, the newest version, then the least loaded. Those that have their share, or are
    short of KV memory, come last, and only if no other is about to have a version for the rest. One that is about to
    have a newer version itself is left out until it has it: a group that starts now would be a version older for all of
    its life. So is one whose newest version is older than `oldest`: a group that starts there is due too soon.
    """
    share = -(-target // max(1, len(instances)))
    hopeful = any(instance.loading and instance.load < share for instance in instances)
    ranked = []
    for instance in instances:
        if not instance.resident or instance.awaits_newer:
            continue
        full = instance.load >= share or instance.crowded
        version = max(instance.resident)
        if version >= oldest and not (full and hopeful):
            ranked.append((full, -version, instance.load, instance.id, instance))
    ranked.sort()  # ids are unique: instances themselves are never compared
    return [(instance, -version) for _, version, _, _, instance in ranked]


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
