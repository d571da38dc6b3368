"""Applies `--set key=value` to the nested tables of a recipe, before validation.

A value is written as in TOML; a bare word is a string; an empty value removes the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any

from stretto.errors import RecipeError


def apply_override(raw: dict[str, Any], override: str) -> list[str]:
    """Sets one key, or removes it if nothing follows the `=`; returns its path."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise RecipeError(f"`--set {override}` is not of the form `key=value`, such as `--set training.steps=20`")
    if not text.strip():
        _remove(raw, parts, override)
        return parts
    value = _value_of(text.strip(), override)
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RecipeError(f"`--set {override}`: `{part}` is a value, not a table")
    table[parts[-1]] = value
    return parts


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


def _remove(raw: dict[str, Any], parts: Sequence[str], override: str) -> None:
    table: Any = raw
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or parts[-1] not in table:
        raise RecipeError(
            f"`--set {override}` removes `{'.'.join(parts)}` from the recipe, and the recipe has no such key; "
            'write `""` for an empty string'
        )
    del table[parts[-1]]
