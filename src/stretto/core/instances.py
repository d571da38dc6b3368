"""The state of one instance: the versions that it holds and the trajectories that it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from stretto.core.messages import LoadVersion, SwapVersion, UnloadVersion

if TYPE_CHECKING:
    from stretto.core.ledger import Trajectory


class RunningEvaluation(NamedTuple):
    """The evaluation that runs."""

    instance: int
    version: int


@dataclass(slots=True, eq=False)
class InstanceState:
    """One instance. A version is `loading` from the command to load it until the instance confirms it, then `resident`.

    Every change is made by a method, which marks the instance in a set that all instances of an `InstanceIndex` share:
    in `changed` if the versions that it holds or runs are others now, and in `reloaded` if its load is another.
    """

    id: int
    slots: int
    resident: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)  # version -> trajectories here, never 0
    movable: dict[int, int] = field(default_factory=dict)  # version -> those that may be moved, never 0
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # those that run here or are between turns
    between_turns: set[int] = field(default_factory=set)  # of these, the ones that wait for their world
    leaving: bool = False  # was asked to leave: nothing new starts here
    short_of_memory: bool = False  # cannot hold the KV of all that it runs, at the last load sample
    pace: float = 1.0  # its speed beside the fastest, at the last load sample; changed by `InstanceIndex` alone
    order: int = 0  # the number of instances that joined before
    changed: set[InstanceState] = field(default_factory=set)
    reloaded: set[InstanceState] = field(default_factory=set)

    @property
    def load(self) -> int:
        """The number of trajectories here that want tokens."""
        return len(self.trajectories) - len(self.between_turns)

    @property
    def work(self) -> float:
        """The load with one more trajectory, over the pace: where this is least, the next one ends first."""
        return (self.load + 1) / self.pace

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.slots - len(self.resident) - len(self.loading)

    @property
    def awaits_newer(self) -> bool:
        """True if it is loading a version that is newer than all that it holds."""
        return bool(self.loading) and bool(self.resident) and max(self.loading) > max(self.resident)

    def holds(self, version: int) -> bool:
        """Returns True if a version is resident or being loaded."""
        return version in self.resident or version in self.loading

    def newest_under(self, version: int) -> int:
        """Returns the newest version that a trajectory which runs here under `version` may have tokens of.

        From the command of a swap on, a token may be of the version that the swap brings, confirmed or not.
        """
        return version if version in self.resident else max(self.loading, default=version)

    # -- changes -------------------------------------------------------------------------------------------------------

    def apply(self, command: LoadVersion | SwapVersion | UnloadVersion) -> None:
        """Records a command. Nothing new can start under the version that a swap overwrites."""
        self.changed.add(self)
        if isinstance(command, UnloadVersion):
            self.resident.remove(command.version)
            return
        if isinstance(command, SwapVersion):
            self.resident.remove(command.old)
        self.loading.add(command.version)

    def confirm(self, version: int) -> None:
        """Records that a version has been loaded."""
        self.changed.add(self)
        self.loading.remove(version)
        self.resident.add(version)

    def leave(self, leaving: bool) -> None:
        """Records that it was asked to leave, or that it stays after all."""
        self.changed.add(self)
        self.leaving = leaving

    def report_memory(self, short_of_memory: bool) -> None:
        """Records whether it is short of KV memory."""
        if short_of_memory != self.short_of_memory:
            self.changed.add(self)
            self.short_of_memory = short_of_memory

    def start(self, trajectories: Collection[Trajectory], version: int) -> None:
        """Records that trajectories run here from now on, under `version`."""
        self.reloaded.add(self)
        for trajectory in trajectories:
            self.trajectories[trajectory.id] = trajectory
            if trajectory.movable:
                self._add(self.movable, version, 1)
        self._add(self.running, version, len(trajectories))

    def stop(self, trajectory: Trajectory) -> bool:
        """Records that a trajectory no longer runs here. Returns True if it was the last of its version."""
        self.reloaded.add(self)
        version = trajectory.version
        assert trajectory.id not in self.between_turns, "it has a row again before it stops"
        del self.trajectories[trajectory.id]
        if trajectory.movable:
            self._add(self.movable, version, -1)
        self._add(self.running, version, -1)
        return version not in self.running

    def free_row(self, trajectory: Trajectory) -> None:
        """Records that a trajectory here waits for its world."""
        self.reloaded.add(self)
        self.between_turns.add(trajectory.id)
        self.make_movable(trajectory, False)

    def take_row(self, trajectory: Trajectory, *, movable: bool) -> None:
        """Records that a trajectory here wants tokens again."""
        self.reloaded.add(self)
        self.between_turns.remove(trajectory.id)
        self.make_movable(trajectory, movable)

    def swap(self, version: int) -> None:
        """Records that all trajectories here run under `version` from now on."""
        self.changed.add(self)
        self.running = {version: len(self.trajectories)} if self.trajectories else {}
        movable = sum(self.movable.values())
        self.movable = {version: movable} if movable else {}

    def make_movable(self, trajectory: Trajectory, movable: bool) -> None:
        """Records whether a trajectory here may be moved to even out the work."""
        if movable != trajectory.movable:
            trajectory.movable = movable
            self._add(self.movable, trajectory.version, 1 if movable else -1)

    def _add(self, counts: dict[int, int], version: int, count: int) -> None:
        before = counts.get(version, 0)
        if before + count:
            counts[version] = before + count
            if before:
                return
        else:
            del counts[version]
        self.changed.add(self)  # the first of the version, or the last


def add_to(counts: dict[int, int], key: int, count: int) -> None:
    """Adds to a count that is absent if it is 0."""
    total = counts.get(key, 0) + count
    if total:
        counts[key] = total
    else:
        del counts[key]


def load_in_one_slot(
    instances: Iterable[InstanceState], newest: int, evaluation: RunningEvaluation | None
) -> list[LoadVersion | SwapVersion | UnloadVersion]:
    """Returns the commands that overwrite the one version of each instance by the newest; trajectories continue.

    An instance that is still loading is skipped until it has confirmed, and one that evaluates until that has ended.
    """
    commands: list[LoadVersion | SwapVersion | UnloadVersion] = []
    for each in instances:
        if each.loading:
            continue
        if not each.resident:
            commands.append(LoadVersion(each.id, newest))
            continue
        (old,) = each.resident
        if old != newest and evaluation != (each.id, old):
            commands.append(SwapVersion(each.id, old, newest))
    return commands


def evictable(instance: InstanceState, evaluation: RunningEvaluation | None) -> list[int]:
    """Returns the versions that may be unloaded from an instance to free a slot, oldest first."""
    return sorted(
        version
        for version in instance.resident
        if version not in instance.running and evaluation != (instance.id, version)
    )
