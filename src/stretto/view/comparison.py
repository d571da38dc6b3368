"""Differences between the recipes of runs, and the runs that are seeds of one recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stretto.store.recipe_history import recipe_values
from stretto.view.runs import RunSource

# Keys that make no other experiment.
FREE = ("seed", "runtime.", "observe.", "training.micro_tokens", "rollout.prefill_tokens")


def comparison(runs: Sequence[RunSource]) -> dict[str, Any]:
    """Returns each key whose value differs between runs, and the sets of runs that differ by their seed alone.

    Keys that make another experiment come first.
    A key that changed as a run was resumed has all of its values, as text.
    """
    recipes = [recipe_values(run.recipe_parts()) for run in runs]
    keys = sorted(set().union(*recipes), key=lambda key: (key.startswith(FREE), key))
    different = [
        {"key": key, "values": [recipe.get(key) for recipe in recipes]}
        for key in keys
        if len({json.dumps(recipe.get(key), default=str) for recipe in recipes}) > 1
    ]
    same: dict[str, list[int]] = {}
    for place, recipe in enumerate(recipes):
        kept = {key: value for key, value in recipe.items() if not key.startswith(FREE)}
        same.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(place)
    return {
        "runs": [run.name for run in runs],
        "differences": different,
        "num_keys": len(keys),
        "without_recipe": [run.name for run, recipe in zip(runs, recipes, strict=True) if not recipe],
        "seeds": list(same.values()),
    }
