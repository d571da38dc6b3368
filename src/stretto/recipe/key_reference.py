"""Generates the reference of a recipe's keys from the models that validate it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stretto.recipe.error_messages import sections
from stretto.recipe.schema import Recipe

HEAD = 2  # lines of a Markdown table before its first row
# Sentences before the keys of a table.
NOTES = {
    "task": (
        "A recipe has one table `[task]`, or several tables `[[task]]`: a mixture of tasks, each with its `label` "
        "([howto/mixtures.md](howto/mixtures.md)). `--set task.LABEL.share=0.3` changes a key of one of several.\n",
    )
}


def describe_keys() -> str:
    """Returns a Markdown table for each section, with a line for each key. Keys of all types come once."""
    parts = ["### Outside of the tables\n", *table(_plain(Recipe), "")]
    for name, variants in sections(Recipe).items():
        default_type = getattr(Recipe.model_fields[name].default, "type", None)
        tables = {tag: table(rows(model), name, default_type) for tag, model in variants.items()}
        first, *others = tables.values()
        shared = [line for line in first[HEAD:] if all(line in other for other in others)] if others else []
        if shared:
            parts += [f"\n### `[{name}]`, for every type\n", *NOTES.get(name, ()), *first[:HEAD], *shared]
        for tag, model in variants.items():
            title = f"### `[{name}]`" + (f', `type = "{tag}"`' if tag else "")
            own = [line for line in tables[tag] if line not in shared]
            parts += [f"\n{title}\n", f"{inspect.cleandoc(model.__doc__ or '')}\n", *own]
    return "\n".join(parts) + "\n"


def _plain(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    tables = sections(model)
    return ((name, field) for name, field in model.model_fields.items() if name not in tables)


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a table; the keys of an inner table follow its own key. Those that all its kinds have come once."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        kinds = list(models(field.annotation))
        if len(kinds) > 1 and not any("type" in kind.model_fields for kind in kinds):
            yield from _rows_of_kinds(kinds, f"{prefix}{name}.")
        else:
            for inner in kinds:
                yield from rows(inner, f"{prefix}{name}.")


def _rows_of_kinds(kinds: Sequence[type[BaseModel]], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of tables that are told apart by a key that each kind has alone, and needs."""
    shared = [name for name in kinds[0].model_fields if all(name in kind.model_fields for kind in kinds)]
    told_by = [name for kind in kinds for name, field in kind.model_fields.items() if field.is_required()]
    one_of = f"one of {', '.join(f'`{name}`' for name in told_by)}"
    done: set[str] = set()
    for kind in kinds:
        for name, field in rows(kind, prefix):
            key = name.removeprefix(prefix)
            if key in done and key in shared:
                continue
            done.add(key)
            if key in told_by:
                field = copy.copy(field)
                field.description = f"{field.description}; default: {one_of}"
            yield name, field


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def table(rows: Iterable[tuple[str, FieldInfo]], section: str, default_type: str | None = None) -> list[str]:
    """The lines of a Markdown table, one for each key. `default_type` is the type of a section that names none."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in rows:
        key = f"{section}.{name}" if section else name
        meaning, _, stated = (field.description or "Selects this table").replace("|", "\\|").partition("; default: ")
        # The model of a table has its type as a default, but a recipe must name it, to select the model.
        is_tag = key.endswith(".type") and len(get_args(field.annotation)) == 1 and field.default != default_type
        default = stated or ("required" if is_tag else _default(field))
        lines.append(f"| `{key}` | {_type(field.annotation)} | {default} | {meaning} |")
    return lines


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _type(annotation: Any) -> str:
    """The name of a type in TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in arguments if part is not NoneType))
    if origin is tuple:
        return f"array of {_type(arguments[0])}s"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}[annotation]
