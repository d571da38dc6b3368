"""Generates the reference of the objectives from their classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.objectives import OBJECTIVES
from stretto.objectives.base import ObjectiveOptions
from stretto.recipe.key_reference import models, table


def describe_objectives() -> str:
    """Returns the options of all objectives, then for each its formula, when to use it and its own options."""
    parts = ["## Options of every objective\n", *_options(dict(_without_type(ObjectiveOptions)))]
    for name, kind in OBJECTIVES.items():
        parts += [f"\n## `{name}`\n", f"{inspect.getdoc(kind)}\n", _formula(kind.formula), f"*When:* {kind.when}\n"]
        own = own_options(kind)
        parts += _options(own) if own else ["No further options."]
    return "\n".join(parts) + "\n"


def own_options(kind: type[ObjectiveOptions]) -> dict[str, FieldInfo]:
    """The options that not every objective has, and those with a different default."""
    common = ObjectiveOptions.model_fields
    return {
        name: field
        for name, field in _without_type(kind)
        if name not in common or common[name].default != field.default
    }


def _options(options: dict[str, FieldInfo]) -> list[str]:
    """The table of options, and one for each inner table, by its types."""
    parts = table(options.items(), "algorithm")
    for name, field in options.items():
        for inner in models(field.annotation):
            kind = inner.model_fields.get("type")
            title = f"\n### `[algorithm.{name}]`" + (f', `type = "{kind.default}"`' if kind else "")
            parts += [f"{title}\n", f"{inspect.getdoc(inner)}\n"]
            if formula := getattr(inner, "formula", None):
                parts.append(_formula(formula))
            parts += table(_without_type(inner), f"algorithm.{name}")
    return parts


def _without_type(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    return ((name, field) for name, field in model.model_fields.items() if name != "type")


def _formula(text: str) -> str:
    lines = text.replace("; ", ";\n")
    return f"```text\n{lines}\n```\n"
