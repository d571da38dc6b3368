"""Chooses the numbers of a line of `metrics.jsonl` that trackers get. `docs/trackers.md` explains the choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Choice = Literal["curated", "all"]

CURATED = {
    "update": (
        "reward_mean",
        "tokens_per_second",
        "staleness_mean",
        "entropy",
        "grad_norm",
        "mismatch_kl",
        "length_mean",
        "truncated",
        "learning_rate",
        "trainer_idle_share",
        "groups_without_signal",
        "failed",
    ),
    "evaluation": ("score", "greedy_score"),
}
CURATED_BY_TASK = ("reward", "score", "share")  # of each task that has a label
_PLACES = ("kind", "update", "version", "at")  # say what the numbers belong to, and are no numbers to draw


def chosen(line: Mapping[str, Any], choice: Choice) -> dict[str, float]:
    """Returns the numbers of a line by name. A number that was not measured is left out; a NaN is not."""
    numbers = dict(_numbers(line, "")) | _derived(line)
    if choice == "curated":
        by_task = [name for name in numbers if name.startswith("task/") and name.rpartition("/")[2] in CURATED_BY_TASK]
        return {name: numbers[name] for name in (*CURATED[line["kind"]], *by_task) if name in numbers}
    return {name: value for name, value in numbers.items() if name not in _PLACES}


def step_of(line: Mapping[str, Any]) -> int:
    """Returns the number of an update, or the version that an evaluation is of."""
    return int(line["update"] if line["kind"] == "update" else line["version"])


def _numbers(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def _derived(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns numbers that are drawn, but not written: they follow from others of the line."""
    if line["kind"] == "update":
        cycle_s = line.get("cycle_seconds", 0.0)
        return {"trainer_idle_share": min(1.0, line["trainer_idle_seconds"] / cycle_s)} if cycle_s > 0 else {}
    score = (line.get("greedy") or {}).get("score")
    return {} if score is None else {"greedy_score": float(score)}
