"""Compares runs that are there, in one table: how their recipes differ, how well they score, and how fast they were."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.api.runs import Run, open_run
from stretto.api.tables import Table
from stretto.errors import RunError
from stretto.store.overview import overview


def compare_runs(runs: Iterable[str | Path | Run]) -> Table:
    """Returns a row for each run: its outcome, scores, speed and age of the data, and the recipe's keys that differ.

    A run that is going on, or was killed, is measured by what it has recorded. `stretto.compare` runs a recipe under
    several paradigms; this runs nothing.
    """
    if isinstance(runs, str | Path | Run):
        raise RunError(f"`compare_runs` takes a list of runs or their folders, this is {runs!r}")
    opened = [run if isinstance(run, Run) else open_run(run) for run in runs]
    recipes = [dict(_leaves(_config(run))) for run in opened]
    keys = sorted({key for recipe in recipes for key in recipe})
    different = [key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)]
    names = _names(opened)
    return Table(
        (
            {"run": name, **_measured(run), **{key: recipe.get(key) for key in different}}
            for name, run, recipe in zip(names, opened, recipes, strict=True)
        ),
        title="runs",
    )


def _measured(run: Run) -> dict[str, Any]:
    """Returns the figures of a run, from its journal: they are there at any time."""
    found, rewards = overview(run.folder), [line["reward_mean"] for line in run.metrics()[-1:]]
    return {
        "outcome": run.outcome,
        "updates": found.updates,
        "score_before": found.score_before,
        "score_after": found.score_after,
        "reward": rewards[0] if rewards else None,
        "tokens_per_second": found.tokens_per_second,
        "age": found.age,
    }


def _config(run: Run) -> Mapping[str, Any]:
    path = run.folder / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"`{path}` cannot be read: {error}") from error


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of nested tables with their values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _names(runs: list[Run]) -> list[str]:
    """Returns the names of the folders, or their paths if two have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
