"""Turns pydantic's validation errors into sentences: the option, the value it got, and what to do instead."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from stretto.options import VARIABLE, form_of, looks_like_key
from stretto.recipe.foreign_names import foreign_hint

_KINDS = {"constrained-int", "constrained-str"}  # pydantic's names of union members that are not tables

# What an option must be, by pydantic's name of the error; the braces are filled from the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "{form}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string that is not empty",
    "string_type": "a string in quotes",
    "too_long": "a list of at most {max_length} values",
    "too_short": "a list of at least {min_length} values",
    "tuple_type": "a list",
}
_MUST = " must be "


def explain(problems: Iterable[Mapping[str, Any]], recipe: type[BaseModel], raw: Mapping[str, Any]) -> list[str]:
    """Returns one line for each option. `recipe` is the model that validated `raw`."""
    found = [problem for problem in problems if not _is_spurious(problem)]
    lines = _joined(line for problem in found for line in _sentences(problem, recipe, raw))
    ratio = next((each["input"] for each in found if _is_ratio(each)), None)
    if ratio is None:
        return lines
    prompts = _prompts(recipe, raw)
    hint = (
        f"; {ratio:g} as the ratio of an asynchronous system, such as ROLL's `async_generation_ratio`, is "
        f"`rollout.staleness = {math.ceil(ratio)}` with `rollout.in_flight = {math.floor((ratio + 1) * prompts)}` "
        f"({ratio + 1:g} * `rollout.prompts`)"
    )
    return [line + hint if line.startswith("`rollout.staleness = ") else line for line in lines]


def _is_spurious(problem: Mapping[str, Any]) -> bool:
    """Tells if a list is called too short although it is not: pydantic counts only the values that are valid."""
    given = problem.get("input")
    return (
        problem["type"] == "too_short"
        and isinstance(given, list | tuple)
        and len(given) >= problem["ctx"]["min_length"]
    )


def _is_ratio(problem: Mapping[str, Any]) -> bool:
    """Tells if a fraction was given for the staleness, as other systems take one."""
    given = problem.get("input")
    return tuple(problem["loc"][:2]) == ("rollout", "staleness") and isinstance(given, float) and 0 < given <= 64


def _prompts(recipe: type[BaseModel], raw: Mapping[str, Any]) -> int:
    """Returns the prompts of an update: those of a recipe, or the default."""
    rollout = raw.get("rollout")
    given = rollout.get("prompts") if isinstance(rollout, Mapping) else None
    return given if isinstance(given, int) else int(recipe.model_fields["rollout"].default.prompts)


def _joined(lines: Iterable[str]) -> list[str]:
    """Joins the errors of one option: pydantic has one for every type that the option may have."""
    by_option: dict[str, list[str]] = {}
    for line in lines:
        option, separator, expected = line.partition(_MUST)
        by_option.setdefault(option + separator, []).append(expected)
    return [option + " or ".join(expected) for option, expected in by_option.items()]


def _sentences(problem: Mapping[str, Any], recipe: type[BaseModel], raw: Mapping[str, Any]) -> Iterator[str]:
    # Pydantic's location includes the variant of a union.
    tags = _KINDS | tags_of(recipe)
    location = [part for part in problem["loc"] if part not in tags and "[" not in str(part)]
    names = [part for part in location if isinstance(part, str)]  # without the places in lists
    if location[:1] == ["task"] and isinstance(tasks := raw.get("task"), list | tuple) and len(location) > 1:
        # One of several tasks: its keys are those of any, and its name is its label.
        raw = {**raw, "task": tasks[int(location[1])]}
        location[1] = labelled(raw["task"], int(location[1]))
    name = _dotted(location)
    kind, got = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        yield f"`{name}` is not an option{_instead(names, recipe, raw)}"
        for inner in _leaves(got):  # of a table that another package has
            if hint := foreign_hint(inner[-1]):
                yield f"`{'.'.join([name, *inner])}` is not an option; {hint}"
    elif kind == "missing" and location and isinstance(location[-1], int):
        yield f"`{_dotted(location[:-1])}` has too few values: {location[-1]}"
    elif kind == "missing":
        yield f"`{name}` is missing"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        given = f" = {as_toml(got['type'])}" if isinstance(got, Mapping) and "type" in got else ""
        variants = _variants(recipe, names)
        near = difflib.get_close_matches(_plain(got.get("type")), variants, n=1) if isinstance(got, Mapping) else []
        hint = f"; did you mean {as_toml(near[0])}?" if near else ""
        yield f"`{name}.type{given}` must be one of {', '.join(map(as_toml, variants))}{hint}"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = sorted(key for key in all_keys(recipe) if key.startswith(f"{name}."))
        first = f"{name}.type" if f"{name}.type" in keys else next(iter(keys), None)
        example = f"; set one of its options, such as `{first}`" if first is not None else ""
        yield f"`{name} = {as_toml(got)}`: `{name}` is a table, not a value{example}"
    elif kind == "value_error":
        yield _in_full(str(problem["msg"]).removeprefix("Value error, "), name, names, recipe)
    elif kind == "string_pattern_mismatch" and problem["ctx"]["pattern"] == VARIABLE and looks_like_key(str(got)):
        yield f"`{name}`{_MUST}{_expected(problem)}; its value looks like a key, and is not shown"
    else:
        yield f"`{name} = {as_toml(got)}`{_MUST}{_expected(problem)}"


def _plain(tag: Any) -> str:
    """Returns the type of a table as we would write it."""
    return str(tag).lower().replace("_", "-")


def _in_full(text: str, name: str, names: Sequence[str], recipe: type[BaseModel]) -> str:
    """Returns what a table says about its keys, with the table: `name`, which is at `names` in a recipe of one task.

    If the text begins with "it", that becomes the name. Else every key is written in full, and the table comes first if
    no key is named.
    """
    if not names:
        return text
    if text.startswith("it "):
        return f"`{name}`{text.removeprefix('it')}"
    known, table = all_keys(recipe), ".".join(names)

    def full(match: re.Match[str]) -> str:
        return f"`{name}.{match[1]}" if f"{table}.{match[1]}" in known else match[0]

    text = re.sub(r"`([a-z_]+)(?=[`. ])", full, text)
    if table == "task":  # it names its keys as those of the only task
        text = re.sub(r"`task\.(?=[a-z])", f"`{name}.", text)
    return text if f"`{name}" in text or f"`{names[0]}." in text else f"`{name}`: {text}"


def labelled(task: Any, place: int) -> str | int:
    """Returns the name of one of several tasks: its label, or its place if it has none that a key can name."""
    label = task.get("label") if isinstance(task, Mapping) else None
    return label if isinstance(label, str) and "." not in label else place


def _expected(problem: Mapping[str, Any]) -> str:
    context = dict(problem.get("ctx") or {})
    words = _EXPECTED.get(problem["type"])
    if words is None:  # a kind of error that no option has today
        return str(problem["msg"]).partition("should be ")[2] or str(problem["msg"])
    if "pattern" in context:
        context["form"] = form_of(context["pattern"])
    if "expected" in context:  # the choices, as pydantic writes them
        context["expected"] = str(context["expected"]).replace("'", '"')
    return words.format_map(context)


def _dotted(location: Sequence[str | int]) -> str:
    """A key as a recipe writes it, with `[1]` for the second value of a list."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def as_toml(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _leaves(value: Any) -> Iterator[list[str]]:
    """The paths of the values in nested tables; none if it is not a table."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from ([str(key), *path] for path in _leaves(item)) if isinstance(item, Mapping) else [[str(key)]]


def _instead(location: Sequence[str], recipe: type[BaseModel], raw: Mapping[str, Any]) -> str:
    """A suggestion for an unknown key: of another type of the table, of another package or table, or misspelled."""
    *table, leaf = location
    keys = all_keys(recipe)
    tags = keys.get(".".join(location))
    if tags is not None and (not tags or _type_of(location[0], recipe, raw) in tags):
        return f" here: it belongs to a table with {' or '.join(_told_by(recipe, table, leaf))}"
    if tags:
        types = " or ".join(f'`{location[0]}.type = "{tag}"`' for tag in tags)
        return f" here: it belongs to {types}, and this recipe has `{_type_of(location[0], recipe, raw)}`"
    if hint := foreign_hint(leaf):
        return f"; {hint}"
    tag = _type_of(location[0], recipe, raw) if table else ""
    siblings = [
        key.rpartition(".")[2]
        for key, of in keys.items()
        if key.rpartition(".")[0] == ".".join(table) and (not of or tag in of)
    ]
    siblings += [name for name in sections(recipe) if not table]
    longer = [".".join([*table, name]) for name in siblings if name.startswith(f"{leaf}_")]
    same = longer or [key for key in keys if key.rpartition(".")[2] == leaf]
    if same:
        return f"; did you mean {' or '.join(f'`{key}`' for key in same)}?"
    nearest = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean `{'.'.join([*table, nearest[0]])}`?"
    leaves = {key.rpartition(".")[2]: key for key in keys}
    nearest = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    return f"; did you mean `{leaves[nearest[0]]}`?" if nearest else ""


def _told_by(recipe: type[BaseModel], table: Sequence[str], leaf: str) -> Iterator[str]:
    """Yields what tells those kinds of an inner table apart that have a key: their type, or a key that they need."""
    for model in _tables_at(recipe, table):
        if leaf in model.model_fields:
            needed = [f"`{name}`" for name, field in model.model_fields.items() if field.is_required()]
            yield f'`type = "{_tag(model)}"`' if "type" in model.model_fields else " and ".join(needed)


def _type_of(section: str, recipe: type[BaseModel], raw: Mapping[str, Any]) -> str:
    """The type of a table in a recipe, or its default."""
    table = raw.get(section)
    given = table.get("type") if isinstance(table, Mapping) else None
    if given is None and section in recipe.model_fields:
        given = getattr(recipe.model_fields[section].default, "type", None)
    return str(given)


def _variants(recipe: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The possible types of the table at a location."""
    return [_tag(model) for model in _tables_at(recipe, location)]


def _tables_at(recipe: type[BaseModel], location: Sequence[str]) -> list[type[BaseModel]]:
    """The models of the table at a location."""
    models: list[type[BaseModel]] = [recipe]
    for name in location:
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        models = list(dict.fromkeys(inner for field in fields for inner in _models_of(field.annotation)))
    return models


def tags_of(model: type[BaseModel]) -> set[str]:
    """The types of all tables in a model, at any depth."""
    found = {_tag(model)} if "type" in model.model_fields else set()
    for field in model.model_fields.values():
        for inner in _models_of(field.annotation):
            found |= tags_of(inner)
    return found


def _tag(model: type[BaseModel]) -> str:
    return str(model.model_fields["type"].annotation.__args__[0])  # type: ignore[union-attr]


def sections(recipe: type[BaseModel]) -> dict[str, dict[str, type[BaseModel]]]:
    """The tables of a recipe with their variants by type; a table without types has one, under the empty string."""
    found: dict[str, dict[str, type[BaseModel]]] = {}
    for name, field in recipe.model_fields.items():
        models = list(_models_of(field.annotation))
        if len(models) > 1:
            found[name] = {_tag(model): model for model in models}
        elif models:
            found[name] = {"": models[0]}
    return found


def all_keys(recipe: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Every dotted key, with the types of its table that have it; empty if all have."""
    keys: dict[str, tuple[str, ...]] = {}
    tables = sections(recipe)
    for name in recipe.model_fields:
        if name not in tables:
            keys[name] = ()
            continue
        variants = {tag: list(_keys_of(model)) for tag, model in tables[name].items()}
        for key in dict.fromkeys(key for leaves in variants.values() for key in leaves):
            having = tuple(tag for tag, leaves in variants.items() if key in leaves)
            keys[f"{name}.{key}"] = having if len(having) < len(variants) else ()
    return keys


def _keys_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        inner = (key for each in _models_of(field.annotation) for key in _keys_of(each))
        yield from (f"{name}.{key}" for key in dict.fromkeys(inner))


def _models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in getattr(annotation, "__args__", ()):
        yield from _models_of(part)
