"""Writes the generated parts of the documentation: `python -m docs.tools.reference`.

A generated part stands between two marks of its page, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Everything comes
from the code: recipes and objectives from their models, commands from the parser, Python from signatures and
docstrings, the journal from its schema, errors from their classes. Tables of measurements come from their cells.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import stretto
from docs.tools.gsm8k_tables import TABLES
from docs.tools.sizing import least_memory_table, recipes_table, sizing_table
from stretto import errors
from stretto.api.policies import TrainedPolicy
from stretto.api.runs import Findings
from stretto.cli import COMMANDS, Command, make_parser
from stretto.cli.arguments import add_verbosity
from stretto.recipe.key_reference import describe_keys
from stretto.recipe.objective_reference import describe_objectives
from stretto.store import schema

ROOT = Path(__file__).parents[2]


def between_marks(text: str, name: str, part: str) -> str:
    """Returns a page with another text between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no marks `{begin}` and `{end}`")
    return f"{before}{begin}\n\n{part}\n{end}{after}"


def cell(text: str) -> str:
    """Returns a text as a cell of a table. Angle brackets outside of code are no HTML."""
    spans = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(span if span.startswith("`") else span.replace("<", "&lt;") for span in spans)


# -- commands ----------------------------------------------------------------------------------------------------------


def describe_commands() -> str:
    """Returns a section for each command: what it does, its arguments and its options."""
    parser = make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["| command | what it does |", "|---|---|"]
    parts += [f"| [`stretto {name}`](#stretto-{name}) | {cell(command.HELP)} |" for name, command in COMMANDS.items()]
    for name, command in COMMANDS.items():
        module = inspect.getmodule(command.add_arguments)
        text = inspect.getdoc(module) or command.HELP
        parts += [f"\n## `stretto {name}`\n", f"{_sentence(text)}\n", *_arguments(commands.choices[name], command)]
    shared = argparse.ArgumentParser()
    add_verbosity(shared)
    parts += ["\n## Options of every command\n", *_table(shared._actions)]
    return "\n".join(parts) + "\n"


def _sentence(docstring: str) -> str:
    """Returns the first paragraph of a module's docstring; its command comes first there."""
    return " ".join(docstring.partition("\n\n")[0].split())


def _arguments(parser: argparse.ArgumentParser, command: Command) -> Iterator[str]:
    """Returns the table of a command's own arguments, or a sentence if it has none."""
    alone = argparse.ArgumentParser(add_help=False)
    command.add_arguments(alone)
    own = [action for action in parser._actions if action.dest in {own.dest for own in alone._actions}]
    yield from _table(own) if own else ("It has no arguments of its own.",)


def _table(actions: Iterable[argparse.Action]) -> Iterator[str]:
    yield from ("| argument | meaning |", "|---|---|")
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        yield f"| {_argument(action)} | {cell(_meaning(action))} |"


def _argument(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if not action.choices else "")
    if not action.option_strings:
        optional = ", may be left out" if action.nargs in ("?", "*") else ", one or more" if action.nargs == "+" else ""
        return f"`{value or '|'.join(map(str, action.choices or ()))}`{optional}".replace("|", "\\|")
    taken = "" if action.nargs == 0 else f" {value}" if value else " ..."
    return ", ".join(f"`{option}{taken}`" for option in action.option_strings)


def _meaning(action: argparse.Action) -> str:
    text = action.help or ""
    if action.choices:
        text += ("; " if text else "") + "one of " + ", ".join(f"`{choice}`" for choice in action.choices)
    shown = action.default not in (None, False, 0, [], argparse.SUPPRESS) and "default" not in text
    return f"{text} (default: {action.default})" if shown else text


# -- Python ------------------------------------------------------------------------------------------------------------


def describe_python() -> str:
    """Returns every public name with its signature and docstring, the methods of classes included."""
    parts: list[str] = []
    for name in stretto.__all__:
        if name == "__version__":
            continue
        thing = getattr(stretto, name)
        parts.append(f"## `stretto.{name}`\n")
        parts += _class(thing) if inspect.isclass(thing) else _function(thing, f"stretto.{name}")
    for kind, where in ((Findings, "`verify` and `run.verify()` return"), (TrainedPolicy, "`run.policy()` returns")):
        parts += [f"## `{kind.__name__}`\n", f"What {where}.\n", *_class(kind)]
    return "\n".join(parts)


def _class(kind: type[Any]) -> Iterator[str]:
    yield f"{_text(kind)}\n"
    rows = []
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            rows.append(f"| `{name}` | {cell(_text(member))} |")
        elif inspect.isfunction(member):
            rows.append(f"| `{name}{cell(_signature(member, without_self=True))}` | {cell(_text(member))} |")
    for field in getattr(kind, "__dataclass_fields__", {}):
        rows.insert(0, f"| `{field}` | {cell(_field_comment(kind, field))} |")
    if rows:
        yield from ("| name | meaning |", "|---|---|", *rows, "")


def _field_comment(kind: type[Any], field: str) -> str:
    """Returns the comment behind a field of a dataclass."""
    found = re.search(rf"^    {field}: .*?(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE)
    return (found[1] or "") if found else ""


def _function(function: Callable[..., Any], name: str) -> Iterator[str]:
    yield f"```text\n{name}{_signature(function)}\n```\n"
    yield f"{_text(function)}\n"


def _text(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def _signature(function: Callable[..., Any], *, without_self: bool = False) -> str:
    """Returns a signature as it is written, on several lines if it is long."""
    source = inspect.signature(function)
    parameters = list(source.parameters.values())[1 if without_self else 0 :]
    shown, star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        annotation = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{_stars(parameter)}{parameter.name}{annotation}{default}")
    result = "" if source.return_annotation is source.empty else f" -> {_annotation(source.return_annotation)}"
    line = f"({', '.join(shown)}){result}"
    if without_self or len(line) < 100:
        return line
    return "(\n    " + ",\n    ".join(shown) + f",\n){result}"


def _stars(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "")


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


# -- the journal -------------------------------------------------------------------------------------------------------


def describe_journal() -> str:
    """Returns a section for each table of the journal: what a row is, and its columns."""
    meanings = dict(_tables_in_words())
    database = sqlite3.connect(":memory:")
    database.executescript(schema.SCHEMA)
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    names = [name for name in names if not name.startswith("sqlite_")]
    if set(names) != set(meanings):
        raise ValueError(f"`store/schema.py` does not describe {set(names) ^ set(meanings)}")
    parts = [f"The version of the schema is {schema.SCHEMA_VERSION}.\n"]
    for name in names:
        parts += [f"## `{name}`\n", f"{meanings[name][:1].upper()}{meanings[name][1:]}.\n"]
        parts += ["| column | type | |", "|---|---|---|"]
        for _, column, kind, not_null, _, key in database.execute(f"PRAGMA table_info({name})"):
            parts.append(f"| `{column}` | {kind} | {'key' if key else '' if not_null else 'may be NULL'} |")
        parts.append("")
    _, _, rest = (inspect.getdoc(schema) or "").partition("\n\nStates, ")
    parts += ["## States and encodings\n", f"States, {rest}\n"]
    return "\n".join(parts)


def _tables_in_words() -> Iterator[tuple[str, str]]:
    """Returns each table with its description, from the indented lines of the module's docstring."""
    lines = (inspect.getdoc(schema) or "").partition("\n\nStates, ")[0].splitlines()
    name, words = "", ""
    for line in lines:
        if found := re.match(r"^    (\w+) {2,}(\S.*)$", line):
            if name:
                yield name, words
            name, words = found[1], found[2]
        elif name and line.startswith("     "):
            words += f" {line.strip()}"
    yield name, words


# -- errors ------------------------------------------------------------------------------------------------------------


def describe_errors() -> str:
    """Returns a table of every error of the package, by the groups of `errors.py`."""
    source = inspect.getsource(errors)
    parts = []
    for heading, body in _groups(source):
        rows = [node for node in ast.parse(body).body if isinstance(node, ast.ClassDef)]
        if not rows:
            continue
        parts += [f"### {heading}\n", "| error | meaning |", "|---|---|"]
        parts += [f"| `{node.name}` | {cell(ast.get_docstring(node) or '')} |" for node in rows]
        parts.append("")
    return "\n".join(parts)


def _groups(source: str) -> Iterator[tuple[str, str]]:
    heading, body = "Bad input", ""
    for line in source.splitlines(keepends=True):
        if found := re.match(r"^# -- (.*?) -+$", line):
            yield heading, body
            heading, body = found[1].capitalize(), ""
        else:
            body += line
    yield heading, body


# -- all of them -------------------------------------------------------------------------------------------------------

GENERATED: Mapping[str, Mapping[str, Callable[[], str]]] = {  # by page, by mark
    "docs/recipes.md": {"keys": describe_keys},
    "docs/algorithms.md": {"keys": describe_objectives},
    "docs/reference/command-line.md": {"commands": describe_commands},
    "docs/reference/python.md": {"python": describe_python},
    "docs/reference/journal.md": {"journal": describe_journal},
    "docs/reference/exit-codes.md": {"errors": describe_errors},
    "docs/howto/gpu.md": {"sizes": sizing_table, "least-memory": least_memory_table, "recipes": recipes_table},
    **TABLES,
}


def with_generated_parts(name: str) -> str:
    """Returns the text of a page with its generated parts as they should be now."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for mark, describe in GENERATED[name].items():
        text = between_marks(text, mark, describe())
    return text


def main() -> None:
    for name in GENERATED:
        made = with_generated_parts(name)
        if made != (ROOT / name).read_text(encoding="utf-8"):
            (ROOT / name).write_text(made, encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
