"""The keys of a recipe, dotted. With several tasks, `task.math.share` is `share` of the task with the label `math`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the values of nested tables by their dotted keys, those of several tasks by their labels."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
        elif not prefix and key == "task" and _are_tables(value):
            for place, each in enumerate(value):
                yield from flat_keys(each, f"task.{each.get('label', place)}.")
        else:
            yield f"{prefix}{key}", value


def of_one_task(key: str, tasks: object) -> str:
    """Returns a dotted key as it is in a recipe of one task: without the label. `tasks` is the recipe's `task`."""
    parts = key.split(".")
    several = isinstance(tasks, list | tuple) and parts[0] == "task" and len(parts) > 2
    return ".".join((parts[0], *parts[2:])) if several else key


def _are_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
