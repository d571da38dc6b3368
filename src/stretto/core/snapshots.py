"""A run's decisions as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stretto.core.ledger import Counters, Group, State, Trajectory
from stretto.core.window import Window

if TYPE_CHECKING:
    from stretto.core.brain import Brain

FORMAT = 2


def record(brain: Brain) -> dict[str, Any]:
    """Everything that `restore` needs, of types that JSON has."""
    ledger = brain.ledger
    return {
        "format": FORMAT,
        "paradigm": brain.plan.paradigm.name,
        "batch": brain.plan.batch,
        "group_size": brain.plan.group_size,
        "next_update": brain.next_update,
        "next_group": brain.next_group,
        "newest": brain.newest,
        "live": sorted(brain.window.live),
        "staleness": brain.staleness,
        "unpublished": brain.unpublished,
        "evaluating": brain.evaluation_cut if brain.evaluating is None else brain.evaluating[1],
        "evaluations_due": sorted(brain.evaluations_due),
        "counters": asdict(ledger.counters),
        "outstanding": [_record_group(group) for group in ledger.groups.values()],
        "finished": list(ledger.finished),
        "training": [_record_group(group) for group in ledger.batch],
        "filtered_in_a_row": brain.filtered_in_a_row,
        "replay": brain.replay.record(),
    }


def restore(brain: Brain, snapshot: Mapping[str, Any]) -> None:
    """Fill a new brain from a record; raises ValueError where its plan does not fit what was recorded."""
    plan, ledger = brain.plan, brain.ledger
    if snapshot["format"] != FORMAT:
        raise ValueError(f"the snapshot has format {snapshot['format']}; this version reads format {FORMAT}")
    for name, now in (
        ("paradigm", plan.paradigm.name),
        ("batch", plan.batch),
        ("group_size", plan.group_size),
    ):
        if snapshot[name] != now:
            raise ValueError(f"`{name}` is {now!r}, but the run was begun with {snapshot[name]!r}: it cannot change")
    needed = snapshot["next_update"] + -(-len(snapshot["outstanding"]) // plan.batch)
    if plan.updates < needed:
        raise ValueError(f"`updates` is {plan.updates}, but what was started already needs {needed}")
    brain.next_update = snapshot["next_update"]
    brain.next_group = snapshot["next_group"]
    brain.window = Window(snapshot["newest"], snapshot["live"])
    if plan.auto:
        brain.staleness = min(snapshot["staleness"], plan.staleness)
    brain.unpublished = snapshot["unpublished"]
    brain.evaluations_due = set(snapshot["evaluations_due"])
    ledger.counters = Counters(**snapshot["counters"])
    brain.evaluation_cut = snapshot["evaluating"]
    for each in snapshot["outstanding"]:
        ledger.enter_again(_restore_group(each), taken=False)
    for each in snapshot["training"]:
        ledger.enter_again(_restore_group(each), taken=True)
    for each in snapshot["finished"]:
        ledger.finish_again(ledger.groups[each])
    brain.filtered_in_a_row = snapshot["filtered_in_a_row"]
    brain.replay.restore(snapshot["replay"])


def _record_group(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "version": group.version,
        "deadline": group.deadline,
        "trajectories": [
            {
                "id": each.id,
                "version": each.version,
                "state": each.state.name.lower(),
                "generation_failures": each.generation_failures,
                "scoring_failures": each.scoring_failures,
                "reward": each.reward,
            }
            for each in group.trajectories
        ],
    }


def _restore_group(record: Mapping[str, Any]) -> Group:
    group = Group(record["id"], record["version"], record["deadline"])
    for each in record["trajectories"]:
        state = State[each["state"].upper()]
        group.trajectories.append(
            Trajectory(
                id=each["id"],
                group=group,
                version=each["version"],
                state=State.PENDING if state is State.RUNNING else state,
                generation_failures=each["generation_failures"],
                scoring_failures=each["scoring_failures"],
                reward=each["reward"],
            )
        )
    return group
