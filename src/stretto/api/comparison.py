"""Compares runs that are there, in one table: how their recipes differ, how well they score, and how fast they were."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stretto.api.runs import Run, open_run
from stretto.api.tables import Table
from stretto.errors import RunError
from stretto.store.overview import overview
from stretto.store.recipe_history import recipe_parts, recipe_values
from stretto.store.schema import journal_path, opened_readonly


def compare_runs(runs: Iterable[str | Path | Run]) -> Table:
    """Returns a row for each run: its outcome, scores, speed and age of the data, and the recipe's keys that differ.

    A key that changed as a run was resumed has all of its values: `0.002, from update 30: 0.001`.
    A run that is going on, or was killed, is measured by what it has recorded. `stretto.compare` runs a recipe under
    several paradigms; this runs nothing.
    """
    if isinstance(runs, str | Path | Run):
        raise RunError(f"`compare_runs` takes a list of runs or their folders, this is {runs!r}")
    opened = [run if isinstance(run, Run) else open_run(run) for run in runs]
    recipes = [_values(run) for run in opened]
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


def _values(run: Run) -> dict[str, Any]:
    """Returns the value of each key of the recipe. One that changed as the run was resumed has all of its values."""
    path = run.folder / "config.toml"
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"`{path}` cannot be read: {error}") from error
    with opened_readonly(journal_path(run.folder)) as db:
        return recipe_values(recipe_parts(db, run.folder))


def _names(runs: list[Run]) -> list[str]:
    """Returns the names of the folders, or their paths if two have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
