"""A core's state as the journal tells it, taken from the core itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from stretto.core.brain import Brain
from stretto.core.ledger import Group, State


def record(brain: Brain) -> dict[str, Any]:
    """What `Brain.restore` takes, in types that JSON has."""
    ledger, running = brain.ledger, set() if brain.evaluating is None else {brain.evaluating[1]}
    made = {
        "paradigm": brain.plan.paradigm.name,
        "batch": brain.plan.batch,
        "group_size": brain.plan.group_size,
        "next_update": brain.next_update,
        "next_group": brain.next_group,
        "newest": brain.newest,
        "live": sorted(brain.window.live),
        "staleness": brain.staleness,
        "unpublished": brain.unpublished,
        "evaluations_due": sorted(brain.evaluations_due | running),
        "counters": asdict(ledger.counters),
        "outstanding": [_group(group) for group in ledger.groups.values()],
        "finished": list(ledger.finished),
        "training": [_group(group) for group in ledger.batch],
        "filtered_in_a_row": brain.filtered_in_a_row,
        "replay": {
            "kept": [asdict(each) for each in brain.replay.kept.values()],
            "chosen": [each.id for each in brain.replay.chosen],
        },
    }
    again: dict[str, Any] = json.loads(json.dumps(made))
    return again


def _group(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "version": group.version,
        "deadline": group.deadline,
        "trajectories": [
            {
                "id": each.id,
                "version": each.version,
                "state": "pending" if each.state is State.RUNNING else each.state.name.lower(),
                "generation_failures": each.generation_failures,
                "scoring_failures": each.scoring_failures,
                "reward": each.reward,
            }
            for each in group.trajectories
        ],
    }
