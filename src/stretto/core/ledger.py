"""The state of every trajectory, and the counts that decisions are made from.

A trajectory is always in exactly one state. A group is *outstanding* from its admission until it is taken into a batch.
It is *finished* when none of its trajectories is still to be generated or scored and at least one has its reward, or
when as many of them have rewards as it wants. An outstanding group is *due* or *in reserve* (`redundancy.py`); without
redundancy all are due. The ledger forgets whatever has ended, except for the counts, so its size is that of the work in
progress.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from stretto.core.instances import InstanceState, add_to
from stretto.errors import TransitionError


class TrajectoryState(IntEnum):
    """The states of a trajectory, the same words as in the journal (`store/schema.py`)."""

    WAITING = 0  # admitted, on no instance
    RUNNING = 1  # on an instance, and wants tokens
    BETWEEN_TURNS = 2  # on an instance, and waits for its world; to the journal it is running
    SCORING = 3  # has its last token, waits for its reward
    SCORED = 4
    TRAINING = 5  # in the batch of the update that runs
    TRAINED = 6
    FAILED = 7
    FILTERED = 8
    DROPPED = 9

    @property
    def label(self) -> str:
        """Its name as a person reads it."""
        return self.name.lower().replace("_", " ")


_S = TrajectoryState
TRANSITIONS: Mapping[TrajectoryState, frozenset[TrajectoryState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.SCORING, _S.DROPPED}),
    _S.RUNNING: frozenset({_S.BETWEEN_TURNS, _S.WAITING, _S.SCORING, _S.FAILED, _S.DROPPED}),
    _S.BETWEEN_TURNS: frozenset({_S.RUNNING, _S.WAITING, _S.SCORING, _S.FAILED, _S.DROPPED}),
    _S.SCORING: frozenset({_S.SCORED, _S.FAILED, _S.DROPPED}),
    _S.SCORED: frozenset({_S.TRAINING, _S.FILTERED, _S.DROPPED}),
    _S.TRAINING: frozenset({_S.TRAINED}),
    _S.TRAINED: frozenset(),
    _S.FAILED: frozenset(),
    _S.FILTERED: frozenset(),
    _S.DROPPED: frozenset(),
}

ENDED_EARLY = frozenset({_S.FAILED, _S.DROPPED})  # before the other trajectories of their group


@dataclass(slots=True, eq=False)
class Trajectory:
    """One trajectory. `version` is the one that it runs under; while it waits, the newest that it may have tokens of.

    `version` never decreases. Which tokens survive the loss of an instance is not known here (those of turns that are
    done, and those that it had when it was last suspended). It is treated as if all survived; if none did, it may wait
    for a newer version than it needs.
    """

    id: int
    group: Group
    version: int
    state: TrajectoryState
    instance: InstanceState | None = None  # set while it runs or is between turns
    generation_failures: int = 0
    scoring_failures: int = 0
    reward: float | None = None  # set once it is scored
    tokens: int = 0  # of context, at the last load sample
    ending: bool = False  # has nearly all tokens that it may have, at the last load sample
    movable_from: int = 0  # the load sample from which it may be moved again to even out the work
    movable: bool = True  # wants tokens, is not about to end and was not moved lately; valid while it has an instance
    suspend_reason: str = ""  # set until it is resumed

    def runs_on(self, instance: int) -> bool:
        """Returns True if it runs on that instance."""
        return self.instance is not None and self.instance.id == instance

    def become(self, state: TrajectoryState) -> None:
        """Changes the state. Raises `TransitionError` if the new state cannot follow."""
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(
                f"trajectory {self.id} (group {self.group.id}, version {self.version}) is {self.state.label} "
                f"and cannot become {state.label}"
            )
        self.state = state


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one prompt. `version` and `deadline` are those of its admission and never change."""

    id: int
    version: int
    deadline: int  # the last update whose batch may hold it; if it is due, one of these batches has to
    trajectories: list[Trajectory] = field(default_factory=list)
    wanted: int | None = None  # rewards with which it is finished, whatever is unfinished then; None: those of all
    in_reserve: bool = False  # changed by the ledger alone
    unfinished: int = 0  # trajectories still to be generated or scored
    scored: int = 0  # trajectories with a reward

    @property
    def is_running(self) -> bool:
        """True if one of its trajectories does not have its last token."""
        return any(each.state < TrajectoryState.SCORING for each in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """True if the rewards so far differ: a group-relative advantage learns from nothing else."""
        rewards = {each.reward for each in self.trajectories if each.reward is not None}
        return len(rewards) > 1


@dataclass(slots=True)
class Counters:
    """The numbers of groups and trajectories so far, by how they ended."""

    admitted_groups: int = 0
    trained_groups: int = 0
    replaced_groups: int = 0  # every trajectory failed; the next prompt took their place
    dropped_groups: int = 0  # as a whole
    filtered_groups: int = 0  # without signal; the next prompt took their place
    spared_groups: int = 0  # without signal, and trained because the limit of filtered groups was reached
    replayed_groups: int = 0  # uses of a group after the first
    admitted: int = 0  # from here on: trajectories
    trained: int = 0
    failed: int = 0
    dropped: int = 0
    filtered: int = 0
    generation_retries: int = 0
    scoring_retries: int = 0
    interrupted: int = 0  # they ran on an instance that was lost
    moved: int = 0  # times that one was moved to another instance
    evaluations: int = 0
    evaluations_skipped: int = 0


class Ledger:
    """Groups, trajectories and their counts. Each method records one thing that happened to them."""

    __slots__ = (
        "batch",
        "counters",
        "finished",
        "finished_at",
        "groups",
        "num_active",
        "num_between_turns",
        "num_samples",
        "outstanding_at",
        "outstanding_of",
        "reserve",
        "running",
        "slot_freed",
        "trajectories",
        "waiting",
    )

    def __init__(self) -> None:
        self.counters = Counters()
        self.trajectories: dict[int, Trajectory] = {}  # of outstanding groups and of the batch in training
        self.groups: dict[int, Group] = {}  # outstanding, due or in reserve
        self.reserve: dict[int, Group] = {}  # of these, the ones in reserve
        self.finished: dict[int, Group] = {}  # outstanding and finished, in the order of finishing
        self.batch: list[Group] = []  # in training, by (version, id)
        self.outstanding_at: dict[int, int] = {}  # deadline -> due groups
        self.finished_at: dict[int, int] = {}  # deadline -> due groups that are finished
        self.outstanding_of: dict[int, int] = {}  # version -> due groups
        self.running: dict[int, int] = {}  # version -> trajectories on instances, those between turns included
        self.waiting: dict[int, dict[int, Trajectory]] = {}  # version -> trajectories by id
        self.num_active = 0  # running or waiting: those that want tokens
        self.num_between_turns = 0
        self.num_samples = 0  # load samples so far
        self.slot_freed = False  # a version lost its last trajectory on some instance; cleared by the scheduler

    @property
    def num_unfinished(self) -> int:
        """The number of trajectories that do not have their last token."""
        return self.num_active + self.num_between_turns

    @property
    def num_due(self) -> int:
        """The number of due groups."""
        return len(self.groups) - len(self.reserve)

    @property
    def finished_due(self) -> list[Group]:
        """The due groups that are finished, in the order of finishing."""
        return [group for group in self.finished.values() if not group.in_reserve]

    @property
    def num_finished_due(self) -> int:
        """The number of due groups that are finished."""
        return sum(self.finished_at.values()) if self.reserve else len(self.finished)

    # -- groups --------------------------------------------------------------------------------------------------------

    def admit(self, group: Group, ids: Sequence[int], instances: Sequence[InstanceState]) -> None:
        """Adds a group and starts all of its trajectories, each on its instance."""
        version = group.version
        for each, instance in zip(ids, instances, strict=True):
            trajectory = Trajectory(each, group, version, TrajectoryState.RUNNING, instance)
            group.trajectories.append(trajectory)
            self.trajectories[each] = trajectory
        group.unfinished = count = len(ids)
        self._enter(group)
        for instance in dict.fromkeys(instances):
            instance.start([each for each in group.trajectories if each.instance is instance], version)
        add_to(self.running, version, count)
        self.num_active += count
        self.counters.admitted_groups += 1
        self.counters.admitted += count

    def take(self, groups: Iterable[Group]) -> None:
        """Moves finished groups into the batch of the next update."""
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.state is TrajectoryState.SCORED:
                    trajectory.become(TrajectoryState.TRAINING)
            self._leave(group)
            self.batch.append(group)
        self.batch.sort(key=lambda each: (each.version, each.id))

    def batch_members(self) -> tuple[int, ...]:
        """Returns the trajectories of the batch, by (version, group, member), without those that failed."""
        return tuple(
            trajectory.id
            for group in self.batch
            for trajectory in group.trajectories
            if trajectory.state is TrajectoryState.TRAINING
        )

    def train(self) -> None:
        """Records that the batch has been trained."""
        for group in self.batch:
            for trajectory in group.trajectories:
                if trajectory.state is TrajectoryState.TRAINING:
                    trajectory.become(TrajectoryState.TRAINED)
                    self.counters.trained += 1
            self._forget(group)
        self.counters.trained_groups += len(self.batch)
        self.batch = []

    def drop(self, group: Group) -> tuple[int, ...]:
        """Drops a group. Returns the trajectories that end as dropped."""
        ended = self._drop(each for each in group.trajectories if each.state not in ENDED_EARLY)
        self._leave(group)
        self._forget(group)
        self.counters.dropped_groups += 1
        return ended

    def drop_surplus(self, group: Group) -> tuple[int, ...]:
        """Drops the trajectories of a finished group that have no reward yet. Returns them; they are forgotten."""
        ended = self._drop(each for each in group.trajectories if each.state < TrajectoryState.SCORED)
        for id in ended:
            del self.trajectories[id]
        group.unfinished = 0
        return ended

    def _drop(self, trajectories: Iterable[Trajectory]) -> tuple[int, ...]:
        ended = list(trajectories)
        for trajectory in ended:
            if trajectory.instance is not None:
                self._stop_running(trajectory)
                self.num_active -= 1
            elif trajectory.state is TrajectoryState.WAITING:
                self._stop_waiting(trajectory)
                self.num_active -= 1
            trajectory.become(TrajectoryState.DROPPED)
        self.counters.dropped += len(ended)
        return tuple(trajectory.id for trajectory in ended)

    def put_in_reserve(self, group: Group) -> None:
        """Puts a due group into reserve."""
        self._count_due(group, -1)
        group.in_reserve = True
        self.reserve[group.id] = group

    def take_from_reserve(self, group: Group) -> None:
        """Makes a group in reserve due."""
        del self.reserve[group.id]
        group.in_reserve = False
        self._count_due(group, 1)

    def filter(self, group: Group) -> tuple[int, ...]:
        """Filters a finished group, which is not trained. Returns the trajectories that end as filtered."""
        ended = [trajectory for trajectory in group.trajectories if trajectory.state not in ENDED_EARLY]
        for trajectory in ended:
            trajectory.become(TrajectoryState.FILTERED)
        self._leave(group)
        self._forget(group)
        self.counters.filtered_groups += 1
        self.counters.filtered += len(ended)
        return tuple(trajectory.id for trajectory in ended)

    # -- trajectories --------------------------------------------------------------------------------------------------

    def run(self, trajectory: Trajectory, instance: InstanceState, version: int) -> None:
        """Runs a waiting trajectory on `instance` under `version`."""
        trajectory.become(TrajectoryState.RUNNING)
        self._stop_waiting(trajectory)
        trajectory.instance, trajectory.version = instance, version
        trajectory.movable = self._is_movable(trajectory)
        instance.start((trajectory,), version)
        add_to(self.running, version, 1)

    def end_turn(self, trajectory: Trajectory) -> None:
        """Records that a running trajectory waits for its world. It keeps its instance and its version."""
        trajectory.become(TrajectoryState.BETWEEN_TURNS)
        assert trajectory.instance is not None
        trajectory.instance.free_row(trajectory)
        self.num_active -= 1
        self.num_between_turns += 1

    def ask_turn(self, trajectory: Trajectory) -> None:
        """Records that a trajectory between turns wants tokens again."""
        trajectory.become(TrajectoryState.RUNNING)
        self._take_row(trajectory)

    def _take_row(self, trajectory: Trajectory) -> None:
        assert trajectory.instance is not None
        trajectory.instance.take_row(trajectory, movable=self._is_movable(trajectory))
        self.num_active += 1
        self.num_between_turns -= 1

    def interrupt(self, trajectory: Trajectory) -> None:
        """Takes a trajectory off its instance; it waits for another, or for the same one."""
        trajectory.become(TrajectoryState.WAITING)
        instance = self._stop_running(trajectory)
        trajectory.version = instance.newest_under(trajectory.version)
        self._start_waiting(trajectory)

    def generate(self, trajectory: Trajectory) -> None:
        """Records that a trajectory has its last token. A waiting one had ended before it was suspended."""
        trajectory.become(TrajectoryState.SCORING)
        if trajectory.instance is not None:
            self._stop_running(trajectory)
        else:
            self._stop_waiting(trajectory)
        self.num_active -= 1

    def score(self, trajectory: Trajectory, reward: float) -> bool:
        """Records the reward of a trajectory. Returns True if its group is finished now."""
        trajectory.become(TrajectoryState.SCORED)
        trajectory.reward = reward
        trajectory.group.scored += 1
        return self._finish_one(trajectory.group)

    def fail(self, trajectory: Trajectory) -> bool:
        """Records that a trajectory has failed for good. Returns True if its group is finished or replaced now."""
        if trajectory.instance is not None:
            self._stop_running(trajectory)
            self.num_active -= 1
        trajectory.become(TrajectoryState.FAILED)
        self.counters.failed += 1
        return self._finish_one(trajectory.group)

    def continue_under(self, instance: InstanceState, version: int) -> None:
        """Records that all trajectories on `instance` continue under `version`."""
        for trajectory in instance.trajectories.values():
            add_to(self.running, trajectory.version, -1)
            trajectory.version = version
        if count := len(instance.trajectories):
            add_to(self.running, version, count)
        instance.swap(version)

    def sample(self, tokens: Mapping[int, int], ending: Container[int]) -> None:
        """Records a load sample: the context of trajectories on instances, and which of them are about to end."""
        self.num_samples += 1
        for id, trajectory in self.trajectories.items():
            if trajectory.instance is not None:
                trajectory.tokens = tokens.get(id, 0)
                trajectory.ending = id in ending
                trajectory.instance.make_movable(trajectory, self._is_movable(trajectory))

    def _is_movable(self, trajectory: Trajectory) -> bool:
        # Between turns it is no work that could be evened out, and elsewhere its episode would begin again.
        return (
            trajectory.state is not TrajectoryState.BETWEEN_TURNS
            and not trajectory.ending
            and trajectory.movable_from <= self.num_samples
        )

    # -- restoring a ledger --------------------------------------------------------------------------------------------

    def restore_group(self, group: Group, *, training: bool) -> None:
        """Adds a group whose trajectories have the states of a snapshot. None of them runs."""
        for trajectory in group.trajectories:
            if trajectory.state is not TrajectoryState.DROPPED:
                self.trajectories[trajectory.id] = trajectory
            if trajectory.state is TrajectoryState.WAITING:
                self._start_waiting(trajectory)
                self.num_active += 1
        group.scored = sum(trajectory.state is TrajectoryState.SCORED for trajectory in group.trajectories)
        group.unfinished = sum(trajectory.state < TrajectoryState.SCORED for trajectory in group.trajectories)
        if training:
            self.batch.append(group)
        else:
            self._enter(group)

    def restore_finished(self, group: Group) -> None:
        """Records that a restored group is finished. Called in the order of finishing."""
        self._finish(group)

    # -- the counts ----------------------------------------------------------------------------------------------------

    def _enter(self, group: Group) -> None:
        self.groups[group.id] = group
        if group.in_reserve:
            self.reserve[group.id] = group
        else:
            self._count_due(group, 1)

    def _leave(self, group: Group) -> None:
        del self.groups[group.id]
        if group.in_reserve:
            del self.reserve[group.id]
        else:
            self._count_due(group, -1)
        self.finished.pop(group.id, None)

    def _count_due(self, group: Group, count: int) -> None:
        """Adds a due group to the counts, or takes it out."""
        add_to(self.outstanding_at, group.deadline, count)
        add_to(self.outstanding_of, group.version, count)
        if group.id in self.finished:
            add_to(self.finished_at, group.deadline, count)

    def _forget(self, group: Group) -> None:
        for trajectory in group.trajectories:
            self.trajectories.pop(trajectory.id, None)  # of a surplus one nothing is left to forget

    def _finish(self, group: Group) -> None:
        self.finished[group.id] = group
        if not group.in_reserve:
            add_to(self.finished_at, group.deadline, 1)

    def _finish_one(self, group: Group) -> bool:
        group.unfinished -= 1
        if group.unfinished and group.scored != group.wanted:
            return False
        if group.scored:
            self._finish(group)
        else:
            self._leave(group)
            self._forget(group)
            self.counters.replaced_groups += 1
        return True

    def _start_waiting(self, trajectory: Trajectory) -> None:
        self.waiting.setdefault(trajectory.version, {})[trajectory.id] = trajectory

    def _stop_waiting(self, trajectory: Trajectory) -> None:
        others = self.waiting[trajectory.version]
        del others[trajectory.id]
        if not others:
            del self.waiting[trajectory.version]
            self.slot_freed = True

    def _stop_running(self, trajectory: Trajectory) -> InstanceState:
        """Takes a trajectory off its instance. Returns the instance."""
        instance = trajectory.instance
        assert instance is not None
        if trajectory.id in instance.between_turns:
            self._take_row(trajectory)
        trajectory.instance = None
        if instance.stop(trajectory):
            self.slot_freed = True
        add_to(self.running, trajectory.version, -1)
        return instance
