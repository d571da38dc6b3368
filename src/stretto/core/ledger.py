"""The life of every trajectory, and the counts that decisions are made from, kept as it goes.

A trajectory is always in exactly one state. An outstanding group is admitted and not yet taken into a batch; it is
finished when none of its trajectories is still to be generated or scored and at least one has its reward. What has
ended is forgotten, except for its count, so the ledger's size is that of the work in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from stretto.core.placement import Instance
from stretto.errors import TransitionError


class State(IntEnum):
    """Where a trajectory is in its life."""

    PENDING = 0  # admitted, waits for an instance
    RUNNING = 1
    SCORING = 2  # generated, waits for its reward
    SCORED = 3
    TAKEN = 4  # in the batch that is being trained on
    TRAINED = 5
    FAILED = 6
    DROPPED = 7
    FILTERED = 8


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.RUNNING, State.SCORING, State.DROPPED}),
    State.RUNNING: frozenset({State.PENDING, State.SCORING, State.FAILED, State.DROPPED}),
    State.SCORING: frozenset({State.SCORED, State.FAILED, State.DROPPED}),
    State.SCORED: frozenset({State.TAKEN, State.DROPPED, State.FILTERED}),
    State.TAKEN: frozenset({State.TRAINED}),
    State.TRAINED: frozenset(),
    State.FAILED: frozenset(),
    State.DROPPED: frozenset(),
    State.FILTERED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Trajectory:
    """One trajectory. `version` is what it runs under, or ran under last."""

    id: int
    group: Group
    version: int
    state: State
    instance: Instance | None = None  # while it runs
    generation_failures: int = 0
    scoring_failures: int = 0
    reward: float | None = None  # once it is scored
    tokens: int = 0  # of context, at the last survey
    ending: bool = False  # it has nearly all tokens that it may have
    rests_until: int = 0  # the survey before which it is not moved again to even out the work
    why: str = ""  # why it was suspended, until it is resumed

    def runs_on(self, instance: int) -> bool:
        return self.instance is not None and self.instance.id == instance

    def become(self, state: State) -> None:
        """Change state, or raise if that cannot follow."""
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(
                f"trajectory {self.id} (group {self.group.id}, version {self.version}) is {self.state.name.lower()} "
                f"and cannot become {state.name.lower()}"
            )
        self.state = state


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one prompt. `version` and `deadline` are those of its admission, for good."""

    id: int
    version: int
    deadline: int  # the update whose batch it must be in at the latest
    trajectories: list[Trajectory] = field(default_factory=list)
    unfinished: int = 0  # still to be generated or scored
    scored: int = 0

    @property
    def has_signal(self) -> bool:
        """Whether the rewards so far differ: a group relative to itself learns from nothing else."""
        rewards = {each.reward for each in self.trajectories if each.reward is not None}
        return len(rewards) > 1


@dataclass(slots=True)
class Counters:
    """What has come of everything so far."""

    admitted_groups: int = 0
    trained_groups: int = 0
    replaced_groups: int = 0  # every trajectory failed; the next prompt took the place
    dropped_groups: int = 0
    filtered_groups: int = 0  # without signal; the next prompt took the place
    spared_groups: int = 0  # without signal and trained, because the limit of filtered ones was reached
    replayed_groups: int = 0  # uses after the first
    admitted: int = 0  # trajectories, here and below
    trained: int = 0
    failed: int = 0
    dropped: int = 0
    filtered: int = 0
    generation_retries: int = 0
    scoring_retries: int = 0
    interrupted: int = 0  # by the loss of an instance
    moved: int = 0  # from one instance to another, each time
    evaluations: int = 0
    evaluations_skipped: int = 0


class Ledger:
    """Groups, trajectories and their counts. Each method is one thing that can happen to them."""

    __slots__ = (
        "batch",
        "counters",
        "finished",
        "finished_at",
        "freed",
        "groups",
        "num_active",
        "outstanding_at",
        "outstanding_of",
        "pending",
        "running",
        "trajectories",
    )

    def __init__(self) -> None:
        self.counters = Counters()
        self.trajectories: dict[int, Trajectory] = {}  # of outstanding groups and of the batch in training
        self.groups: dict[int, Group] = {}  # outstanding
        self.finished: dict[int, Group] = {}  # outstanding and finished, in the order of finishing
        self.batch: list[Group] = []  # being trained on, by (version, id)
        self.outstanding_at: dict[int, int] = {}  # deadline -> groups
        self.finished_at: dict[int, int] = {}  # deadline -> groups
        self.outstanding_of: dict[int, int] = {}  # version -> groups
        self.running: dict[int, int] = {}  # version -> trajectories
        self.pending: dict[int, dict[int, Trajectory]] = {}  # version -> trajectories by id
        self.num_active = 0  # running or pending
        self.freed = False  # a version has lost its last trajectory on some instance; cleared by who looks

    # -- what happens to a group ---------------------------------------------------------------------------------------

    def admit(self, group: Group, ids: Sequence[int], instance: Instance) -> None:
        """Enter a group and start all of it on `instance`."""
        version = group.version
        for each in ids:
            trajectory = Trajectory(each, group, version, State.RUNNING, instance)
            group.trajectories.append(trajectory)
            self.trajectories[each] = instance.trajectories[each] = trajectory
        group.unfinished = count = len(ids)
        self._enter(group)
        _add(instance.running, version, count)
        _add(self.running, version, count)
        self.num_active += count
        self.counters.admitted_groups += 1
        self.counters.admitted += count

    def take(self, groups: Iterable[Group]) -> None:
        """Move finished groups into the batch that is to be trained on."""
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.state is not State.FAILED:
                    trajectory.become(State.TAKEN)
            self._leave(group)
            self.batch.append(group)
        self.batch.sort(key=lambda each: (each.version, each.id))

    def batch_members(self) -> tuple[int, ...]:
        """The trajectories of the batch, ordered by (version, group, member); those that failed are left out."""
        return tuple(
            trajectory.id
            for group in self.batch
            for trajectory in group.trajectories
            if trajectory.state is State.TAKEN
        )

    def train(self) -> None:
        """The batch has been trained on."""
        for group in self.batch:
            for trajectory in group.trajectories:
                if trajectory.state is State.TAKEN:
                    trajectory.become(State.TRAINED)
                    self.counters.trained += 1
            self._forget(group)
        self.counters.trained_groups += len(self.batch)
        self.batch = []

    def drop(self, group: Group) -> tuple[int, ...]:
        """Throw a group away; the trajectories that this ends."""
        ended = [trajectory for trajectory in group.trajectories if trajectory.state is not State.FAILED]
        for trajectory in ended:
            if trajectory.state is State.RUNNING:
                self._stop_running(trajectory)
                self.num_active -= 1
            elif trajectory.state is State.PENDING:
                self._stop_pending(trajectory)
                self.num_active -= 1
            trajectory.become(State.DROPPED)
        self._leave(group)
        self._forget(group)
        self.counters.dropped_groups += 1
        self.counters.dropped += len(ended)
        return tuple(trajectory.id for trajectory in ended)

    def filter(self, group: Group) -> tuple[int, ...]:
        """A finished group is not trained on; the trajectories that this ends."""
        ended = [trajectory for trajectory in group.trajectories if trajectory.state is not State.FAILED]
        for trajectory in ended:
            trajectory.become(State.FILTERED)
        self._leave(group)
        self._forget(group)
        self.counters.filtered_groups += 1
        self.counters.filtered += len(ended)
        return tuple(trajectory.id for trajectory in ended)

    # -- what happens to a trajectory ----------------------------------------------------------------------------------

    def run(self, trajectory: Trajectory, instance: Instance, version: int) -> None:
        """A pending trajectory goes on, on `instance` under `version`."""
        trajectory.become(State.RUNNING)
        self._stop_pending(trajectory)
        trajectory.instance, trajectory.version = instance, version
        instance.trajectories[trajectory.id] = trajectory
        _add(instance.running, version, 1)
        _add(self.running, version, 1)

    def interrupt(self, trajectory: Trajectory) -> None:
        """A running trajectory is to go on elsewhere or again."""
        trajectory.become(State.PENDING)
        self._stop_running(trajectory)
        self._wait_for_instance(trajectory)

    def generate(self, trajectory: Trajectory) -> None:
        """A trajectory has its last token; a pending one, because it had ended before it was suspended."""
        was_running = trajectory.state is State.RUNNING
        trajectory.become(State.SCORING)
        if was_running:
            self._stop_running(trajectory)
        else:
            self._stop_pending(trajectory)
        self.num_active -= 1

    def score(self, trajectory: Trajectory, reward: float) -> bool:
        """A trajectory has its reward; whether its group is finished with that."""
        trajectory.become(State.SCORED)
        trajectory.reward = reward
        trajectory.group.scored += 1
        return self._finish_one(trajectory.group)

    def fail(self, trajectory: Trajectory) -> bool:
        """A trajectory has failed for good; whether its group is finished or replaced with that."""
        if trajectory.state is State.RUNNING:
            self._stop_running(trajectory)
            self.num_active -= 1
        trajectory.become(State.FAILED)
        self.counters.failed += 1
        return self._finish_one(trajectory.group)

    def continue_under(self, instance: Instance, version: int) -> None:
        """Everything that runs on `instance` goes on under `version` from here."""
        for trajectory in instance.trajectories.values():
            _add(self.running, trajectory.version, -1)
            trajectory.version = version
        if count := len(instance.trajectories):
            _add(self.running, version, count)
            instance.running = {version: count}

    # -- a ledger from a record ----------------------------------------------------------------------------------------

    def enter_again(self, group: Group, *, taken: bool) -> None:
        """Put back a group with trajectories in the states of a record. Nothing runs yet."""
        for trajectory in group.trajectories:
            self.trajectories[trajectory.id] = trajectory
            if trajectory.state is State.PENDING:
                self._wait_for_instance(trajectory)
                self.num_active += 1
        group.scored = sum(trajectory.state is State.SCORED for trajectory in group.trajectories)
        group.unfinished = sum(trajectory.state < State.SCORED for trajectory in group.trajectories)
        if taken:
            self.batch.append(group)
        else:
            self._enter(group)

    def finish_again(self, group: Group) -> None:
        """Put back that a group is finished; called in the order of finishing."""
        self.finished[group.id] = group
        _add(self.finished_at, group.deadline, 1)

    # -- the counts ----------------------------------------------------------------------------------------------------

    def _enter(self, group: Group) -> None:
        self.groups[group.id] = group
        _add(self.outstanding_at, group.deadline, 1)
        _add(self.outstanding_of, group.version, 1)

    def _leave(self, group: Group) -> None:
        del self.groups[group.id]
        _add(self.outstanding_at, group.deadline, -1)
        _add(self.outstanding_of, group.version, -1)
        if self.finished.pop(group.id, None) is not None:
            _add(self.finished_at, group.deadline, -1)

    def _forget(self, group: Group) -> None:
        for trajectory in group.trajectories:
            del self.trajectories[trajectory.id]

    def _finish_one(self, group: Group) -> bool:
        group.unfinished -= 1
        if group.unfinished:
            return False
        if group.scored:
            self.finished[group.id] = group
            _add(self.finished_at, group.deadline, 1)
        else:
            self._leave(group)
            self._forget(group)
            self.counters.replaced_groups += 1
        return True

    def _wait_for_instance(self, trajectory: Trajectory) -> None:
        self.pending.setdefault(trajectory.version, {})[trajectory.id] = trajectory

    def _stop_pending(self, trajectory: Trajectory) -> None:
        waiting = self.pending[trajectory.version]
        del waiting[trajectory.id]
        if not waiting:
            del self.pending[trajectory.version]
            self.freed = True

    def _stop_running(self, trajectory: Trajectory) -> None:
        instance, version = trajectory.instance, trajectory.version
        assert instance is not None
        trajectory.instance = None
        del instance.trajectories[trajectory.id]
        left = instance.running[version] - 1
        if left:
            instance.running[version] = left
        else:
            del instance.running[version]
            self.freed = True
        _add(self.running, version, -1)


def _add(counts: dict[int, int], key: int, count: int) -> None:
    """Add to a count that is absent when it is 0."""
    total = counts.get(key, 0) + count
    if total:
        counts[key] = total
    else:
        del counts[key]
