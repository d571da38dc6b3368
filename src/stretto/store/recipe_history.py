"""The values of a run's recipe over its phases: one value, or several with the updates from which they hold."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stretto.store.phase_checks import CONFIG_NAME, read_phases
from stretto.store.recipe_keys import flat_keys

Parts = Sequence[tuple[int, Mapping[str, Any]]]
"""The first update of each part of a run, and its recipe with dotted keys."""


def recipe_parts(db: sqlite3.Connection, folder: Path) -> Parts:
    """Returns the parts of a run that have recipes of their own, in order; none if no recipe can be read.

    The last recipe is that of `config.toml`, which may be edited where it says how a run is executed. A phase in which
    no update began is left out.
    """
    parts = {each.first_update: flat(each.recipe) for each in read_phases(db) if each.recipe is not None}
    try:
        last = flat(tomllib.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        last = {}
    if last:
        parts[max(parts, default=0)] = last
    return sorted(parts.items())


def recipe_values(parts: Parts) -> dict[str, Any]:
    """Returns the value of each key; `0.002, from update 30: 0.001` for one that has changed."""
    values: dict[str, Any] = {}
    for key in sorted({key for _, recipe in parts for key in recipe}):
        steps = [(first, recipe.get(key)) for first, recipe in parts]
        steps = steps[:1] + [after for before, after in pairwise(steps) if after[1] != before[1]]
        if len(steps) == 1:
            values[key] = steps[0][1]
        else:
            later = [f"from update {first}: {in_words(value)}" for first, value in steps[1:]]
            values[key] = ", ".join([in_words(steps[0][1]), *later])
    return values


def recipe_changes(parts: Parts) -> list[tuple[int, list[tuple[str, str, str]]]]:
    """Returns the first update of each part but the first, and the keys that changed: name, old and new value."""
    found = []
    for (_, before), (first, after) in pairwise(parts):
        keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        if keys:
            found.append((first, [(key, in_words(before.get(key)), in_words(after.get(key))) for key in keys]))
    return found


def in_words(value: Any) -> str:
    """Returns a value of a recipe as text; `not set` for None."""
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables as one, with dotted keys."""
    return dict(flat_keys(table))
