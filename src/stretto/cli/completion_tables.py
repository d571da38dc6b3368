"""The words to complete: the commands with their options and arguments, from the parser, and the keys of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

Kind = Literal["nothing", "words", "key", "recipe", "run", "folder", "file"]
"""The kind of a value. `key`: `key=value` of a recipe; `run`: a run folder; `nothing`: a number, or free text."""

KINDS: Mapping[str, Kind] = {  # by the name of the value in the help
    "KEY=VALUE": "key",
    "RECIPE": "recipe",
    "RUN": "run",
    "DIR": "folder",
    "FOLDER": "folder",
    "FILE": "file",
}


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an option, or an argument."""

    kind: Kind
    words: tuple[str, ...] = ()  # those that are allowed, if kind is `words`


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command."""

    names: tuple[str, ...]
    help: str
    value: Value | None  # None: it takes none


@dataclass(frozen=True, slots=True)
class CommandTable:
    """A command."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Value, ...]  # in order; the last one stands for further ones


def command_tables(parser: argparse.ArgumentParser) -> list[CommandTable]:
    """Returns the commands of a parser."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {each.dest: each.help or "" for each in commands._choices_actions}
    return [_command(name, helps.get(name, ""), each) for name, each in commands.choices.items()]


def _command(name: str, help: str, parser: argparse.ArgumentParser) -> CommandTable:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return CommandTable(
        name,
        help,
        tuple(
            Option(tuple(action.option_strings), action.help or "", None if action.nargs == 0 else _value(action))
            for action in actions
            if action.option_strings
        ),
        tuple(_value(action) for action in actions if not action.option_strings),
    )


def _value(action: argparse.Action) -> Value:
    if action.choices is not None:
        return Value("words", tuple(map(str, action.choices)))
    return Value(KINDS.get(str(action.metavar), "nothing"))


def recipe_keys() -> dict[str, tuple[str, ...]]:
    """Returns the dotted keys of a recipe, each with its values if there are few. Imports no torch."""
    from stretto.recipe.error_messages import sections
    from stretto.recipe.key_reference import models, rows
    from stretto.recipe.schema import Recipe

    keys: dict[str, tuple[str, ...]] = {}
    tables = sections(Recipe)
    plain = {name: field for name, field in Recipe.model_fields.items() if name not in tables}
    found = [(name, field.annotation) for name, field in plain.items()]
    for section, variants in tables.items():
        found += [(f"{section}.{name}", field.annotation) for model in variants.values() for name, field in rows(model)]
        if len(variants) > 1:
            keys[f"{section}.type"] = tuple(variants)
    for key, annotation in found:
        words = tuple(_words(annotation))
        if not any(models(annotation)):
            keys[key] = tuple(dict.fromkeys((*keys.get(key, ()), *words)))
    return dict(sorted(keys.items()))


def _words(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    else:
        parts = get_args(annotation)
        for part in parts[:1] if get_origin(annotation) is Annotated else parts:
            if get_origin(annotation) is not tuple:
                yield from _words(part)
