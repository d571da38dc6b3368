"""The numbers of updates and evaluations, kept as they are read: a finished update never changes."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from typing import Any

# Of each update; a name that an update does not have is None. `docs/metrics.md` explains them.
NUMBERS = (
    *("reward_mean", "reward_std", "tokens", "tokens_per_second", "staleness_mean", "staleness_max", "entropy"),
    *("grad_norm", "mismatch_kl", "mismatch_tokens", "staleness_kl", "length_mean", "length_max", "truncated"),
    *("loss", "learning_rate", "update_seconds", "cycle_seconds", "trainer_idle_seconds", "groups"),
    *("groups_without_signal", "filtered_groups", "effective_sample_size", "ratio_max", "num_sequences", "turns_mean"),
)


REWARD = "reward/"  # the beginning of the name of each of several rewards


class Curves:
    """The updates, evaluations, versions and instances of a run. Not for several threads at once."""

    def __init__(self) -> None:
        self._updates: list[dict[str, Any]] = []  # finished, in order
        self._rewards: dict[str, None] = {}  # `reward/NAME` of each of several rewards, in their order
        self._trained_s = 0.0  # by the wall clock, until the end of the last of them; pauses do not count
        self._evaluations: list[dict[str, Any]] = []
        self._last_evaluation = 0
        self._versions: dict[int, tuple[float, float | None]] = {}
        self._training: list[float] | None = None
        self._instances: list[dict[str, Any]] = []
        self._tasks: list[str] = []  # labels

    def refresh(self, db: sqlite3.Connection) -> None:
        """Reads what is new."""
        self._tasks = self._tasks or task_labels(db)
        last = self._updates[-1]["update"] if self._updates else -1
        rows = db.execute(
            "SELECT update_id, taken_at, finished_at, metrics FROM updates WHERE update_id > ? ORDER BY update_id",
            (last,),
        )
        self._training = None
        for update, taken_at, finished_at, metrics in rows:
            if finished_at is None:
                self._training = [update, taken_at]
                break
            line = _update(update, taken_at, finished_at, metrics, self._tasks)
            took = line["cycle_seconds"]
            self._trained_s += finished_at - taken_at if took is None else took
            self._updates.append({**line, "elapsed_seconds": round(self._trained_s, 4)})
            self._rewards |= dict.fromkeys(line["rewards"])
        evaluations = db.execute(
            "SELECT id, version, kind, at, reward, num, seconds, line FROM evaluations WHERE id > ? ORDER BY id",
            (self._last_evaluation,),
        )
        for id, version, kind, at, reward, num, seconds, line in evaluations:
            recorded = json.loads(line) if line else {}
            greedy = (recorded.get("greedy") or {}).get("score")
            tasks = {label: finite(recorded.get(f"task/{label}/score")) for label in self._tasks}
            self._last_evaluation = id
            self._evaluations.append(
                {"id": id, "version": version, "kind": kind, "at": at, "score": reward, "greedy": greedy, "num": num,
                 "seconds": seconds, "tasks": tasks}
            )  # fmt: skip
        newest = max(self._versions, default=0)
        self._versions |= {
            version: (published, loaded)
            for version, published, loaded in db.execute(
                "SELECT version, published_at, loaded_at FROM versions WHERE version >= ?", (newest,)
            )
        }
        self._instances = [
            {"instance": instance, "session": session, "joined_at": joined, "left_at": left, "outcome": outcome}
            for session, instance, joined, left, outcome in db.execute(
                "SELECT session, instance, joined_at, left_at, outcome FROM instances ORDER BY session, instance"
            )
        ]

    def payload(self, after: int = -1) -> dict[str, Any]:
        """Returns columns of the updates behind `after`, and everything else."""
        chosen = [line for line in self._updates if line["update"] > after]
        names = ("update", "taken_at", "finished_at", "elapsed_seconds", *NUMBERS, *_of_tasks(self._tasks))
        columns = {name: [line[name] for line in chosen] for name in names}
        for name in self._rewards:
            columns[name] = [line["rewards"].get(name) for line in chosen]
        reasons = {line["update"]: line["waited_for"] for line in chosen if line["waited_for"]}
        warnings = {line["update"]: line["warnings"] for line in chosen if line["warnings"]}
        return {
            "updates": columns,
            "rewards": [name.removeprefix(REWARD) for name in self._rewards],
            "waited_for": reasons,
            "warnings": warnings,
            "training": self._training,
            "evaluations": self._evaluations,
            "versions": [[version, *times] for version, times in sorted(self._versions.items())],
            "instances": self._instances,
            "tasks": self._tasks,
        }


def task_labels(db: sqlite3.Connection) -> list[str]:
    """Returns the labels of the tasks of a run, in the order of its recipe."""
    found = db.execute("SELECT value FROM run WHERE key = 'tasks'").fetchone()
    return [str(label) for label, *_ in json.loads(found[0])] if found else []


def _of_tasks(labels: Sequence[str]) -> list[str]:
    return [f"task/{label}/reward" for label in labels]


def _update(update: int, taken_at: float, finished_at: float, metrics: str, tasks: Sequence[str]) -> dict[str, Any]:
    line = json.loads(metrics or "{}")
    return {
        "update": update,
        "taken_at": taken_at,
        "finished_at": finished_at,
        **{name: finite(line.get(name)) for name in (*NUMBERS, *_of_tasks(tasks))},
        "rewards": {name: finite(value) for name, value in line.items() if name.startswith(REWARD)},
        "waited_for": line.get("trainer_waited_for") or "",
        "warnings": line.get("warnings") or [],
    }


def finite(value: Any) -> float | None:
    """Returns a number that JSON has; None for anything else, and for an infinity or a NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value
