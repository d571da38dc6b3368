"""A controller's state as a snapshot, taken from the controller itself."""

from __future__ import annotations

from dataclasses import replace

from stretto.core.controller import Controller
from stretto.core.ledger import Group, Trajectory, TrajectoryState
from stretto.core.snapshots import GroupSnapshot, Snapshot, TrajectorySnapshot


def record(controller: Controller) -> Snapshot:
    """Returns what `Controller.restore` takes."""
    ledger, running = controller.ledger, set() if controller.evaluating is None else {controller.evaluating[1]}
    return Snapshot(
        paradigm=controller.plan.paradigm.name,
        batch=controller.plan.batch,
        group_size=controller.plan.group_size,
        members=controller.plan.members,
        next_update=controller.next_update,
        next_group=controller.next_group,
        newest=controller.newest,
        live=frozenset(controller.window.live),
        staleness=controller.staleness,
        unpublished=controller.unpublished,
        evaluations_due=frozenset(controller.evaluations_due | running),
        counters=replace(ledger.counters),
        outstanding=tuple(_group(controller, group) for group in ledger.groups.values()),
        finished=tuple(ledger.finished),
        training=tuple(_group(controller, group) for group in ledger.batch),
        filtered_in_a_row=controller.filtered_in_a_row,
        reusable=tuple(controller.reuse.kept.values()),
        reused=tuple(each.id for each in controller.reuse.chosen),
    )


def _group(controller: Controller, group: Group) -> GroupSnapshot:
    members = tuple(_trajectory(controller, each) for each in group.trajectories)
    return GroupSnapshot(group.id, group.version, group.deadline, members)


def _trajectory(controller: Controller, each: Trajectory) -> TrajectorySnapshot:
    """A trajectory without its instance. Which versions it has run under is not recorded: it may need the newest."""
    in_rollout = each.state < TrajectoryState.SCORING
    return TrajectorySnapshot(
        id=each.id,
        version=controller.newest if in_rollout and not controller.plan.paradigm.pinned else each.version,
        state=TrajectoryState.WAITING if in_rollout else each.state,
        generation_failures=each.generation_failures,
        scoring_failures=each.scoring_failures,
        reward=each.reward,
    )
