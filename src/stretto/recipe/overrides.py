"""Applies overrides to the nested tables of a recipe, before validation.

`--set key=value` has its value written as in TOML; a bare word is a string; an empty value removes the key. From Python
an override is a dotted key with its value; None removes the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe.task_tables import table_at, task_named

Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value`, as after `--set`, or dotted keys with their values."""


def apply_overrides(raw: dict[str, Any], overrides: Overrides) -> set[tuple[str, ...]]:
    """Applies all of them, in order, and returns the paths of their keys."""
    if isinstance(overrides, str):
        raise RecipeError(f"overrides are `{overrides!r:.80}`; give a mapping, or a list of such strings")
    if isinstance(overrides, Mapping):
        return {tuple(_apply_value(raw, key, value)) for key, value in overrides.items()}
    return {tuple(apply_override(raw, override)) for override in overrides}


def described(overrides: Overrides) -> str:
    """Returns overrides as the user wrote them."""
    if isinstance(overrides, Mapping):
        return ", ".join(f"{key} = {value!r}" for key, value in overrides.items())
    return " ".join(f"--set {override}" for override in overrides)


def _apply_value(raw: dict[str, Any], key: object, value: Any) -> list[str]:
    """Sets a dotted key to a value of Python, or removes it if that is None; returns its path."""
    if not isinstance(key, str) or not all(key.split(".")):
        raise RecipeError(f"the override `{key!r}` is no dotted key, such as `training.steps`")
    parts, written = key.split("."), f"{key} = {value!r:.80}"
    if value is None:
        _remove(raw, parts, written)
    else:
        _put(raw, parts, str(value) if isinstance(value, PurePath) else value, f"`{written}`")
    return parts


def apply_override(raw: dict[str, Any], override: str) -> list[str]:
    """Sets one key, or removes it if nothing follows the `=`; returns its path."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise RecipeError(f"`--set {override}` is not of the form `key=value`, such as `--set training.steps=20`")
    if not text.strip():
        _remove(raw, parts, f"--set {override}")
        return parts
    _put(raw, parts, _value_of(text.strip(), override), f"`--set {override}`")
    return parts


def _put(raw: dict[str, Any], parts: Sequence[str], value: Any, written: str) -> None:
    table = raw
    if isinstance(tasks := raw.get("task"), list | tuple) and parts[0] == "task" and len(parts) > 1:
        table, parts = task_named(tasks, parts, written), parts[2:]
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{written}: `{part}` is a value, not a table")
    table[parts[-1]] = value


def _value_of(text: str, override: str) -> Any:
    """Parses a TOML value; a bare word is a string."""
    before = "value = "
    try:
        return tomllib.loads(before + text)["value"]
    except ValueError as error:  # not TOML, or an integer of more digits than Python converts
        if text[0] not in "{[\"'":
            return text
        reason = re.sub(r"line 1, column (\d+)", lambda place: f"character {int(place[1]) - len(before)}", str(error))
        raise RecipeError(
            f"`--set {override}`: `{text}` is not valid TOML: {reason}; write it as in a recipe, with strings in quotes"
        ) from error


def _remove(raw: dict[str, Any], parts: Sequence[str], written: str) -> None:
    if isinstance(tasks := raw.get("task"), list | tuple) and parts[0] == "task" and len(parts) > 1:
        task_named(tasks, parts, f"`{written}`")
    table = table_at(raw, parts[:-1])
    if not isinstance(table, dict) or parts[-1] not in table:
        raise RecipeError(
            f"`{written}` removes `{'.'.join(parts)}` from the recipe, and the recipe has no such key; "
            'write `""` for an empty string'
        )
    del table[parts[-1]]
