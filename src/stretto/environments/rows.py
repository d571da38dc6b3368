"""Rows of a data set: a prompt or messages, and columns for the reward. Made from records of any source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stretto.chat.messages import for_template
from stretto.environments.row_faults import RowFaults
from stretto.errors import ChatError, RecipeError

Message = Mapping[str, Any]  # role, content, and what else a chat template reads

ASKING = ("prompt", "messages")  # a row has one of these columns


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set, with `messages`, `text` or both. A chat template, if there is one, gets the `messages`."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # handed to the reward function
    tools: tuple[Mapping[str, Any], ...] = ()  # that the chat template shows; also a column
    where: str | None = field(default=None, compare=False)  # its file and line, for error messages


def make_rows(
    records: Iterable[tuple[str, Any]],
    columns: Mapping[str, str] | None = None,
    faults: RowFaults | None = None,
    *,
    system: str | None = None,
) -> list[Row]:
    """Makes rows of records with their places, and takes the records over.

    `columns` are names of ours with those of the data set. With `system`, every row is a chat that begins with this
    message. Raises `RecipeError` for all records that are no rows, and for the `faults` that were found while they were
    read.
    """
    found, names = RowFaults() if faults is None else faults, dict(columns or {})
    all_lack, some_lack = RowFaults(), RowFaults()  # a prompt: one of them is reported
    rows = []
    for where, record in records:
        try:
            row = to_row(renamed(record, names), where)
            rows.append(row if system is None else _with_system(row, system))
        except _NoPromptError as error:
            all_lack.add(where, missing_prompt(error.columns))
            some_lack.add(where, _without_prompt(error.columns))
        except _BadRowError as error:
            found.add(where, str(error))
    found.include(some_lack if rows else all_lack)
    found.refuse()
    return rows


class _BadRowError(Exception):
    """A record that is no row; its text follows the place of the record in a sentence."""


class _NoPromptError(_BadRowError):
    """A record that has neither a prompt nor messages."""

    def __init__(self, columns: Iterable[str]) -> None:
        super().__init__("it has neither a prompt nor messages")
        self.columns = list(columns)


def split_held_out(rows: Sequence[Row], num: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Splits off `num` random rows for evaluation. Returns (training rows, evaluation rows), both in order."""
    if not 0 <= num < len(rows):
        raise RecipeError(f"{num} of {len(rows)} rows cannot be held out for evaluation: nothing is left to train on")
    held = set(np.random.default_rng([seed, len(rows)]).permutation(len(rows))[:num].tolist())
    train = [row for number, row in enumerate(rows) if number not in held]
    return train, [row for number, row in enumerate(rows) if number in held]


def count_shared(train: Sequence[Row], held_out: Sequence[Row], *, by_columns: bool = False) -> int:
    """Returns how many held-out rows ask what a training row asks too: the same text, or messages and tools.

    `by_columns`: only if their columns are equal too, as in tasks where a prompt alone does not say what is asked.
    Passes over the training rows once, with a lookup for each.
    """
    ends = {_last_text(row) for row in held_out}
    trained = {_asks(row, by_columns) for row in train if _last_text(row) in ends}
    return sum(_asks(row, by_columns) in trained for row in held_out)


def _last_text(row: Row) -> str | None:
    """Returns a text that two rows with the same prompt have in common, without much work."""
    if row.messages is None:
        return row.text
    content = row.messages[-1].get("content")
    return content if isinstance(content, str) else None


def _asks(row: Row, by_columns: bool) -> tuple[Any, ...]:
    asked = row.text if row.messages is None else json.dumps((row.messages, row.tools), sort_keys=True, default=str)
    columns = json.dumps(row.columns, sort_keys=True, default=str) if by_columns else ""
    return row.messages is None, asked, columns


# -- columns -----------------------------------------------------------------------------------------------------------


def renamed(record: Any, columns: Mapping[str, str]) -> Any:
    """Gives columns of a record other names: `columns` has ours with theirs.

    A column that had the name already must be renamed too. If `prompt` or `messages` is among ours, the row is asked
    with that one, and others of these names are left out.
    """
    if not columns or not isinstance(record, dict):
        return record
    for ours, theirs in columns.items():
        if theirs not in record:
            raise _BadRowError(missing_column(ours, theirs, record))
        if ours in record and ours not in ASKING and ours not in columns.values():
            raise _BadRowError(
                f"`task.columns.{ours} = {theirs!r}` would replace a column `{ours}` that the row has; choose another "
                f'name, or give that column one too, such as `task.columns = {{ {ours} = "{theirs}", other_{ours} = '
                f'"{ours}" }}`'
            )
    values = {ours: record[theirs] for ours, theirs in columns.items()}
    for theirs in columns.values():
        record.pop(theirs, None)
    for name in ASKING if any(name in columns for name in ASKING) else ():
        record.pop(name, None)
    record.update(values)
    return record


def missing_column(ours: str, theirs: str, names: Iterable[str]) -> str:
    """Returns what is wrong with a row, or a file, that lacks a column of `task.columns`."""
    have = sorted(map(str, names))
    if ours in have:
        return (
            f"`task.columns.{ours} = {theirs!r}`: there is no column `{theirs}`, but a column `{ours}`: the map is "
            f'written the wrong way round, our name comes first: `task.columns = {{ {theirs} = "{ours}" }}`; the '
            f"columns are {_listed(have)}"
        )
    near = difflib.get_close_matches(theirs, have, n=1, cutoff=0.5) or [
        each for each in have if each.lower() == theirs.lower()
    ]
    hint = f"; the nearest is `{near[0]}`" if near else ""
    return f"`task.columns.{ours} = {theirs!r}`: there is no column `{theirs}`{hint}; the columns are {_listed(have)}"


def missing_prompt(names: Iterable[str]) -> str:
    """Returns what is wrong with a row, or a file, that has neither a prompt nor messages."""
    have = sorted(map(str, names))
    likely = next((name for name in LIKELY if name in have), have[0] if have else "question")
    return (
        f"a row has a column `prompt` or a column `messages`, this has {_listed(have)}; name the one to ask with, such "
        f"as `task.columns = {{ prompt = {json.dumps(likely, ensure_ascii=False)} }}`"
    )


def _without_prompt(names: Iterable[str]) -> str:
    """Returns what is wrong with a row that has neither a prompt nor messages, while others have."""
    return (
        "this row lacks the column `prompt` or `messages` that other rows have; add it, or remove the row (its columns "
        f"are {_listed(sorted(map(str, names)))})"
    )


LIKELY = ("question", "problem", "instruction", "input", "query", "text", "conversations", "conversation")
"""Columns that data sets often have for what is asked, the likeliest first."""


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(f"`{name:.40}`" for name in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


# -- one row -----------------------------------------------------------------------------------------------------------


def to_row(record: Any, where: str) -> Row:
    """Checks one record, which it takes over, and returns it as a row; `where` is its place in error messages."""
    if not isinstance(record, dict):
        raise _BadRowError(f"a row is an object with named columns, this is {type(record).__name__}")
    if isinstance(record.get("prompt"), str) and "messages" not in record and "completion" not in record:
        return Row(text=record.pop("prompt"), columns=record, where=where)  # most rows
    given = [name for name in ASKING if name in record]
    asked = {name: record.pop(name) for name in given}
    held = [name for name, value in asked.items() if value is not None]
    if len(held) == len(ASKING):
        raise _BadRowError(
            "a row has a column `prompt` or a column `messages`, but this has both; remove one of them, or choose one, "
            'such as `task.columns = { messages = "messages" }`'
        )
    if not held and given:
        raise _BadRowError(f"`{given[-1]}` is null; give it a value, or remove the row")
    if not held:
        raise _NoPromptError(record)
    if "completion" in record:
        raise _BadRowError(
            "the name `completion` is reserved for what the model generates; rename the column, for example with "
            '`task.columns = { answer = "completion" }`'
        )
    (name,) = held
    value = asked[name]
    if name == "prompt" and isinstance(value, str):
        return Row(text=value, columns=record, where=where)
    if name == "prompt" and not isinstance(value, list):
        raise _BadRowError(f"`prompt` is a string, or a list of messages, this is {type(value).__name__}")
    tools = _check_tools(record.get("tools"))
    if tools:
        record["tools"] = [dict(tool) for tool in tools]
    return Row(messages=_check_messages(value, name), columns=record, tools=tools, where=where)


def _with_system(row: Row, system: str) -> Row:
    messages = row.messages if row.messages is not None else ({"role": "user", "content": row.text or ""},)
    if messages[0]["role"] == "system":
        raise _BadRowError(
            "`task.system` is given, but this row already begins with a system message; remove one of them"
        )
    return replace(row, text=None, messages=({"role": "system", "content": system}, *messages))


def _check_messages(messages: Any, name: str) -> tuple[Message, ...]:
    """Returns the messages of a row. A text is the message of the user, unless it is a list of messages as JSON."""
    if isinstance(messages, str):
        messages = _messages_in(messages) or [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise _BadRowError(f"`{name}` is a list of objects with `role` and `content`, this is {messages!r:.80}")
    made = []
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        speaks = fields.get("content") is not None or fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not speaks:
            raise _BadRowError(f"a message has a `role` and a `content`, this is {message!r:.80}")
        try:
            made.append(for_template(message))
        except ChatError as error:
            raise _BadRowError(str(error)) from error
    if made[-1]["role"] == "assistant":
        raise _BadRowError(
            f"the last of `{name}` has the role `assistant`; end with a message that the model answers (`task.prefill` "
            "opens every answer alike)"
        )
    return tuple(made)


def _messages_in(text: str) -> Any:
    """Returns the messages that a text has as JSON; None if it has none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    is_chat = isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found)
    return found if is_chat else None


def _check_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a row with messages. In a Parquet file, whose columns have one type, they may be JSON."""
    said = "`tools` is a list of functions, as the OpenAI API describes them, or such a list as JSON"
    given = tools
    if isinstance(tools, str):
        try:
            given = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise _BadRowError(f"{said}; this is {tools!r:.80}") from error
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _BadRowError(f"{said}; this is {given!r:.80}")
    for tool in given:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _BadRowError(f"{said}; one of them is {tool!r:.80}")
    return tuple(given)
