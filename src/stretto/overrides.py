"""`--set key=value` on the nested tables of a recipe, before anything of them is validated.

A value is written as in TOML; a bare word is a string; nothing after the `=` takes the key out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any

from stretto.errors import RecipeError


def apply_override(raw: dict[str, Any], override: str) -> list[str]:
    """Set one key, or take it out where nothing follows the `=`; returns its path."""
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
    """The TOML value that a text is; a bare word is a string."""
    before = "value = "
    try:
        return tomllib.loads(before + text)["value"]
    except tomllib.TOMLDecodeError as error:
        if text[0] not in "{[\"'":
            return text
        said = re.sub(r"line 1, column (\d+)", lambda place: f"character {int(place[1]) - len(before)}", str(error))
        raise RecipeError(
            f"`--set {override}`: `{text}` is no valid TOML: {said}; write it as in a recipe, a string in quotes"
        ) from error


def _remove(raw: dict[str, Any], parts: Sequence[str], override: str) -> None:
    table: Any = raw
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or parts[-1] not in table:
        raise RecipeError(
            f"`--set {override}` takes `{'.'.join(parts)}` out of the recipe, and the recipe has no such key; "
            'write `""` for an empty string'
        )
    del table[parts[-1]]
