"""A core that goes on where another one was, from what that had decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.core.ledger import Counters, Group, State, Trajectory
from stretto.core.window import Window

if TYPE_CHECKING:
    from stretto.core.brain import Brain


def restore(brain: Brain, snapshot: Mapping[str, Any]) -> None:
    """Fill a new brain from what its journal tells (`store/recovery.py`); ValueError where its plan does not fit."""
    plan, ledger = brain.plan, brain.ledger
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
    for each in snapshot["outstanding"]:
        ledger.enter_again(_restore_group(each), taken=False)
    for each in snapshot["training"]:
        ledger.enter_again(_restore_group(each), taken=True)
    for each in snapshot["finished"]:
        ledger.finish_again(ledger.groups[each])
    brain.filtered_in_a_row = snapshot["filtered_in_a_row"]
    brain.replay.restore(snapshot["replay"])


def _restore_group(record: Mapping[str, Any]) -> Group:
    group = Group(record["id"], record["version"], record["deadline"])
    for each in record["trajectories"]:
        group.trajectories.append(
            Trajectory(
                id=each["id"],
                group=group,
                version=each["version"],
                state=State[each["state"].upper()],
                generation_failures=each["generation_failures"],
                scoring_failures=each["scoring_failures"],
                reward=each["reward"],
            )
        )
    return group
