"""A run as trackers see it, without a model: a folder with a recipe, and lines of updates and evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.observe.listeners import Listeners, Outcome
from stretto.observe.metrics import JsonLines
from stretto.observe.options import ObserveOptions
from stretto.observe.trackers import sample_rows
from stretto.observe.trackers.catalogue import add_trackers
from stretto.recipe.reading import parse_recipe

CLOSE_S = 60.0


class FakeRun:
    """The run that listeners get."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcome: Outcome = "running"

    def stop(self) -> None:
        raise AssertionError("a tracker never stops a run")


def begin(folder: Path, **observe: Any) -> ObserveOptions:
    """Makes a run folder with its recipe. Returns the options of its trackers."""
    folder.mkdir(parents=True)
    raw = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "observe": observe}
    recipe = parse_recipe(raw)
    (folder / "config.toml").write_text(recipe.dumps(), encoding="utf-8")
    return recipe.observe


def update(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "update",
        "update": number,
        "at": 100.0 + number,
        "reward_mean": number / 10,
        "tokens_per_second": 1_000.0,
        "staleness_mean": 1.5,
        "staleness_histogram": {"0": 3, "1": 5},
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "length_mean": 12.0,
        "truncated": 0.25,
        "failed": 0,
        "trainer_idle_seconds": 0.5,
        "cycle_seconds": 2.0,
        "trainer_waited_for": "group 3",
        "collapsing": [],
        "warnings": [],
        **changes,
    }


def evaluation(version: int, moment: str = "during") -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "version": version,
        "moment": moment,
        "score": 0.25,
        "greedy": {"score": 0.5, "num_scored": 4, "num_failed": 0, "mean_tokens": 3.0},
        "num_scored": 4,
        "at": 50.0 + version,
    }


def report(
    folder: Path,
    options: ObserveOptions,
    lines: list[dict[str, Any]],
    *,
    outcome: Outcome = "finished",
    say: Callable[[str], None] = lambda text: None,
    close_s: float = CLOSE_S,
    before_end: Callable[[], None] = lambda: None,
) -> None:
    """Delivers a session of a run to its trackers, as `train` does."""
    run = FakeRun(folder)
    listeners = Listeners()
    add_trackers(options, listeners, say)
    listeners.wait_at_most(close_s)
    listeners.start(run)
    written = JsonLines(folder / "metrics.jsonl")
    for line in lines:
        written.write(line)
        listeners.write(line)
    before_end()
    run.outcome = outcome
    (folder / "summary.json").write_text(json.dumps({"eval_before": 0.25, "eval_after": 0.5, "steps": len(lines)}))
    listeners.close(run)


def rows_of(update: int, most: int) -> list[sample_rows.Row]:
    """Samples, with text that a tracker must not take for markup."""
    texts = ["1+1= <b>|bold|</b>\n\x1b[31m2", "three"]
    return [
        {
            "update": update,
            "group": number,
            "trajectory": number,
            "version": update,
            "age": 0,
            "reward": 0.5 if number else None,
            "reward/format": None if number else 0.125,
            "tokens": 3,
            "finish": "stop",
            "prompt": "1+1=",
            "completion": texts[number % 2],
        }
        for number in range(most)
    ]
