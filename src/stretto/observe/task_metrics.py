"""The metrics of each task that has a label: `task/LABEL/...` in the lines of `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stretto.types import EvaluationResult, HeldOutScore, Sample, by_trajectory

TaskSums = dict[str, dict[str, int]]
"""By label: the groups that were trained, those that were filtered, and the trajectories that failed."""


class TaskMetrics:
    """Adds up what happens to the tasks of a run between updates."""

    def __init__(
        self, pass_rewards: Mapping[str, float], epochs: Callable[[], Mapping[str, float]] = dict[str, float]
    ) -> None:
        """`pass_rewards`: the lowest reward that counts as solved, by label. `epochs`: those drawn so far."""
        self._pass_rewards = pass_rewards
        self._epochs = epochs
        self._since: Counter[tuple[str, str]] = Counter()  # since the last update

    def count(self, sums: TaskSums, task: str | None, what: str) -> None:
        """Counts a trajectory of a task that `failed`, or a group that was filtered (`filtered_groups`)."""
        if task is not None:
            self._since[task, what] += 1
            _add(sums, task, what, 1)

    def of_update(self, samples: Sequence[Sample], sums: TaskSums) -> dict[str, float]:
        """Returns the metrics of an update, and adds its groups to the sums of the run."""
        for label in self._pass_rewards:
            groups = {sample.group for sample in samples if sample.task == label and sample.use == 0}
            _add(sums, label, "groups", len(groups))
        total = sum(own["groups"] for own in sums.values())
        epochs, line = self._epochs(), dict[str, float]()
        for label, pass_reward in self._pass_rewards.items():
            own = [sample for sample in samples if sample.task == label]
            found: dict[str, float] = {
                "groups": len({sample.group for sample in own if sample.use == 0}),
                "share": sums[label]["groups"] / total if total else 0.0,
                "failed": self._since[label, "failed"],
                "filtered_groups": self._since[label, "filtered_groups"],
            }
            if label in epochs:
                found["epoch"] = epochs[label]
            if own:
                rewards = np.array([uses[0].reward for uses in by_trajectory(own)])
                found |= {
                    "reward": float(rewards.mean()),
                    "reward_std": float(rewards.std()),
                    "pass_rate": float((rewards >= pass_reward).mean()),
                    "length": sum(sample.completion.num_sampled for sample in own) / len(own),
                    "truncated": sum(sample.completion.finish == "length" for sample in own) / len(own),
                }
            line |= {f"task/{label}/{name}": value for name, value in found.items()}
        self._since.clear()
        return line


def of_evaluation(result: EvaluationResult) -> dict[str, float | int | None]:
    """Returns the scores of the tasks in an evaluation."""
    line: dict[str, float | int | None] = {}
    for label, score in result.tasks.items():
        line |= _scores(f"task/{label}/", score.sampled)
        if score.greedy is not None:
            line |= _scores(f"task/{label}/greedy_", score.greedy)
    return line


def _scores(prefix: str, score: HeldOutScore) -> dict[str, float | int | None]:
    return {
        f"{prefix}score": score.score,
        f"{prefix}num_scored": score.num_scored,
        f"{prefix}num_failed": score.num_failed,
        f"{prefix}mean_tokens": score.mean_tokens,
    }


def of_summary(sums: TaskSums, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the totals of each task, with its score in the first evaluation before the run and the last after it."""
    total = sum(own.get("groups", 0) for own in sums.values())
    found = {}
    for label, own in sums.items():
        scores = {
            moment: [each.get(f"task/{label}/score") for each in evaluations if each["moment"] == moment]
            for moment in ("before", "after")
        }
        found[label] = {
            "groups": own.get("groups", 0),
            "share": own.get("groups", 0) / total if total else 0.0,
            "filtered_groups": own.get("filtered_groups", 0),
            "failed_trajectories": own.get("failed", 0),
            "eval_before": scores["before"][0] if scores["before"] else None,
            "eval_after": scores["after"][-1] if scores["after"] else None,
        }
    return found


def labels_in(line: Mapping[str, Any]) -> list[str]:
    """Returns the labels of the tasks that a line of `metrics.jsonl` has something of, in their order."""
    return list(dict.fromkeys(name.split("/")[1] for name in line if name.startswith("task/")))


def _add(sums: TaskSums, task: str, what: str, count: int) -> None:
    own = sums.setdefault(task, {})
    own[what] = own.get(what, 0) + count
