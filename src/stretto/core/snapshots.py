"""The state of a run that a controller continues from, and how a new controller takes it over.

`run/recovery.py` reads a snapshot from the journal. It has no instances and nothing that runs: a trajectory that ran
when the run ended is `waiting`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.core.ledger import ENDED_EARLY, Counters, Group, Trajectory, TrajectoryState
from stretto.core.redundancy import Outstanding, reserve_after_restart
from stretto.core.reuse import ReusableGroup
from stretto.core.versions import VersionWindow

if TYPE_CHECKING:
    from stretto.core.controller import Controller
    from stretto.core.plan import Plan


@dataclass(frozen=True, slots=True)
class TrajectorySnapshot:
    """One trajectory. `version` is the oldest that it may continue under."""

    id: int
    version: int
    state: TrajectoryState
    generation_failures: int = 0
    scoring_failures: int = 0
    reward: float | None = None  # once it is scored


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group, with all of its trajectories in the order of its members."""

    id: int
    version: int
    deadline: int  # the last update whose batch may hold it
    trajectories: tuple[TrajectorySnapshot, ...]

    @property
    def is_finished(self) -> bool:
        """True if no trajectory is still to be generated or scored, and at least one has its reward."""
        states = {each.state for each in self.trajectories}
        return TrajectoryState.SCORED in states and states <= {TrajectoryState.SCORED, *ENDED_EARLY}

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ."""
        return len({each.reward for each in self.trajectories if each.state is TrajectoryState.SCORED}) > 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a controller has to know of the past of its run."""

    paradigm: str  # these four cannot change
    batch: int
    group_size: int
    members: int  # that a group starts with
    next_update: int  # the next update whose batch is not yet taken
    next_group: int
    newest: int  # the newest version that was published
    live: frozenset[int]  # the versions whose weights are needed, the newest included
    staleness: int  # K of the last admission
    unpublished: int | None  # a version that was trained and not yet published
    evaluations_due: frozenset[int]  # versions
    counters: Counters
    outstanding: tuple[GroupSnapshot, ...]  # admitted, and in no batch yet
    finished: tuple[int, ...]  # the outstanding groups that are finished, in the order of finishing
    training: tuple[GroupSnapshot, ...]  # the batch that was taken and not trained, by (version, id)
    filtered_in_a_row: int  # groups filtered since the last batch was taken
    reusable: tuple[ReusableGroup, ...]  # trained groups that may be used again, by id
    reused: tuple[int, ...]  # those of them that the batch in training uses again, by (version, id)


def restore(controller: Controller, snapshot: Snapshot) -> None:
    """Fills a new controller. Raises `ValueError` if its plan does not fit the run."""
    plan, ledger = controller.plan, controller.ledger
    for name, now, before in (
        ("paradigm", plan.paradigm.name, snapshot.paradigm),
        ("batch", plan.batch, snapshot.batch),
        ("group_size", plan.group_size, snapshot.group_size),
        ("members", plan.members, snapshot.members),
    ):
        if before != now:
            raise ValueError(f"`{name}` is {now!r}, but the run was begun with {before!r}: it cannot change")
    needed = snapshot.next_update + -(-(len(snapshot.outstanding) - plan.reserve_groups) // plan.batch)
    if plan.updates < needed:
        raise ValueError(f"`updates` is {plan.updates}, but the groups that were started already need {needed}")
    controller.next_update = snapshot.next_update
    controller.ramping = plan.ramps and (snapshot.next_update == 0 or len(snapshot.outstanding) < plan.batch)
    controller.next_group = snapshot.next_group
    controller.window = VersionWindow(snapshot.newest, snapshot.live)
    if plan.auto:
        controller.staleness = min(snapshot.staleness, plan.staleness)
    # A bound that is another than before holds for groups that are admitted from now on. The others keep their
    # deadlines, and admission keeps the invariant with all of them.
    controller.unpublished = snapshot.unpublished
    controller.evaluations_due = set(snapshot.evaluations_due)
    ledger.counters = replace(snapshot.counters)  # counters change, snapshots do not
    reserve = _reserve(snapshot, plan) if plan.reserve_groups else frozenset()
    for group in _groups(snapshot.outstanding, plan):
        group.in_reserve = group.id in reserve
        ledger.restore_group(group, training=False)
    for group in _groups(snapshot.training, plan):
        ledger.restore_group(group, training=True)
    for id in snapshot.finished:
        ledger.restore_finished(ledger.groups[id])
    controller.filtered_in_a_row = snapshot.filtered_in_a_row
    controller.reuse.restore(snapshot.reusable, snapshot.reused)


def _reserve(snapshot: Snapshot, plan: Plan) -> frozenset[int]:
    """Returns the groups in reserve. If `in_flight` is smaller than before, more groups than it allows may be due."""
    groups = [Outstanding(each.id, each.deadline, each.is_finished) for each in snapshot.outstanding]
    left = (plan.updates - snapshot.next_update) * plan.batch
    most_due = min(max(plan.in_flight, len(groups) - plan.reserve_groups), left)
    return reserve_after_restart(groups, snapshot.next_update, plan.batch, most_due)


def _groups(snapshots: Iterable[GroupSnapshot], plan: Plan) -> Iterable[Group]:
    for each in snapshots:
        group = Group(each.id, each.version, each.deadline, wanted=plan.group_size)
        group.trajectories += [
            Trajectory(
                id=one.id,
                group=group,
                version=one.version,
                state=one.state,
                generation_failures=one.generation_failures,
                scoring_failures=one.scoring_failures,
                reward=one.reward,
            )
            for one in each.trajectories
        ]
        yield group
