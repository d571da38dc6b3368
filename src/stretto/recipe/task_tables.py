"""Finds the table of a dotted key in a recipe: `task.math.share` is `share` of the task with the label `math`.

A recipe has one table `[task]`, or several `[[task]]`, which are told apart by their labels.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.errors import RecipeError

Path = tuple[str, ...]
"""The parts of a dotted key."""


def table_at(values: Any, path: Sequence[str]) -> Any:
    """Returns what lies at a path in nested tables; None if there is nothing."""
    for part in path:
        if isinstance(values, list | tuple):
            values = next((each for each in values if isinstance(each, Mapping) and each.get("label") == part), None)
        else:
            values = values.get(part) if isinstance(values, Mapping) else None
    return values


def remove_key(values: Any, path: Sequence[str]) -> None:
    """Removes a key from nested tables, if it is there."""
    table = table_at(values, path[:-1])
    if isinstance(table, dict):
        table.pop(path[-1], None)


def without_none(value: Any) -> Any:
    """Returns nested tables without the keys that are None, which TOML cannot write."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def task_named(tasks: Sequence[Any], parts: Sequence[str], written: str) -> Any:
    """Returns the table of the task that an override names. Raises `RecipeError` if it names none."""
    labels = [str(each.get("label")) for each in tasks if isinstance(each, Mapping) and each.get("label") is not None]
    known = ", ".join(f"`{label}`" for label in labels) or "none: give each a `label`"
    found = table_at({"task": tasks}, parts[:2]) if len(parts) > 2 else None
    if found is not None:
        return found
    near = difflib.get_close_matches(parts[1], labels, n=1, cutoff=0.6) if len(parts) > 1 else []
    if len(parts) > 2 or near:
        hint = f"; did you mean `{'.'.join([parts[0], near[0], *parts[2:]])}`?" if near else ""
        raise RecipeError(f"{written}: no task has the label `{parts[1]}`{hint} (labels: {known})")
    raise RecipeError(
        f"{written}: the recipe has several tasks; name one of them, as in "
        f"`task.{labels[0] if labels else 'LABEL'}.{parts[-1]}` (labels: {known})"
    )
