"""Rows of a data set, and the endless stream of prompts that a run draws from them.

Position `index` of the stream is row `permutation(seed, epoch)[index % rows]` with `epoch = index // rows`. It depends
on nothing else, so a resumed run continues with the same prompts. With `PassRates` (`prompt_order.py`) it also depends
on earlier rewards, and each position is drawn once.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.environments.prompt_order import Draw, PassRates
from stretto.errors import RecipeError
from stretto.types import Prompt

CHECKED_ROWS = 20_000  # a data set in memory with at most this many rows is tokenized completely at the start
CHECK_S = 3.0  # larger and generated data sets are tokenized for this long: a row may take milliseconds to generate
CHECKED_AT_ONCE = 16
CACHED_PROMPTS = 1024

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # beside those that a chat template names

Message = Mapping[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set, with `messages`, `text` or both. A chat template, if there is one, gets the `messages`."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # handed to the reward function
    tools: tuple[Mapping[str, Any], ...] = ()  # that the chat template shows; also a column
    where: str | None = field(default=None, compare=False)  # its file and line, for error messages


class PromptStream:
    """An endless, shuffled stream of prompts with random access.

    An empty or too long prompt is an error at the start. One that was not checked at the start is returned as it is:
    the engine refuses it, and its trajectories fail and are counted.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        *,
        seed: int,
        max_prompt_tokens: int,
        shuffle: bool = True,
        pass_rates: PassRates | None = None,
        name: str = "the data set",
        task: str | None = None,
    ) -> None:
        """Checks the lengths of the prompts; see `CHECKED_ROWS`.

        `name` is the data set's name in error messages. `shuffle = False` keeps the order of the rows, for evaluation.
        If `pass_rates` is given, it draws the rows; `shuffle` then only sets the order in which lengths are checked.
        `task` is the label of the task, which its prompts have too.
        """
        if len(rows) == 0:
            raise RecipeError(f"{name} has no rows; there is nothing to ask the model")
        self._rows = rows
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._shuffle = shuffle
        self._pass_rates = pass_rates
        self._name = name
        self._task = task
        self._permutation = lru_cache(maxsize=2)(self._permute)
        self._tokenized = lru_cache(maxsize=CACHED_PROMPTS)(self._tokenize)
        self.longest_checked = 0  # tokens
        self.num_unknown = 0  # checked rows with text that the tokenizer does not know
        self.first_unknown = ""  # such text, and its place
        in_memory = isinstance(rows, list | tuple) and len(rows) <= CHECKED_ROWS
        self.num_checked = self._check_all(math.inf if in_memory else CHECK_S)  # rows, in the order of the draw

    @property
    def num_rows(self) -> int:
        """Prompts in one epoch."""
        return len(self._rows)

    @property
    def num_templated(self) -> int:
        """Rows whose prompts the chat template renders; the others are raw text. Generated rows are all alike."""
        if self._tokenizer.chat_template is None:
            return 0
        if isinstance(self._rows, list | tuple):
            return sum(row.messages is not None for row in self._rows)
        return len(self._rows) if self._rows[0].messages is not None else 0

    def epoch(self, index: int) -> int:
        """Returns the number of epochs completed before position `index`, if rows come in epochs."""
        return index // len(self._rows)

    @property
    def follows_rewards(self) -> bool:
        """True if later draws depend on rewards."""
        return self._pass_rates is not None

    def draw(self, index: int) -> Draw:
        """Draws the row at position `index`, with a reason. With pass rates, each position is drawn once, in order."""
        if self._pass_rates is not None:
            return replace(self._pass_rates.draw(index), task=self._task)
        return Draw(self.row_number(index), self.epoch(index), "shuffled" if self._shuffle else "in order", self._task)

    def drawn(self, row_number: int, task: str | None = None) -> None:
        """Notes that a row was drawn before the run was resumed."""
        if self._pass_rates is not None:
            self._pass_rates.drawn(row_number)

    def scored(self, row_number: int, reward: float, task: str | None = None) -> None:
        """Notes the reward of a trajectory of a row, for later draws."""
        if self._pass_rates is not None:
            self._pass_rates.scored(row_number, reward)

    def settle(self, update: int) -> None:
        """Notes that the batch of an update was taken: the rewards noted before count for later draws."""
        if self._pass_rates is not None:
            self._pass_rates.settle(update)

    def prompt(self, index: int, row_number: int | None = None, task: str | None = None) -> Prompt:
        """Returns the prompt at position `index`, made from row `row_number` if that is given."""
        number = self.row_number(index) if row_number is None else row_number
        text, tokens, columns = self._tokenized(number)
        return Prompt(index=index, text=text, tokens=tokens, row=columns, task=self._task)

    def row_number(self, index: int) -> int:
        """Returns the row at position `index`, if rows come in epochs."""
        epoch, place = divmod(index, len(self._rows))
        return int(self._permutation(epoch)[place]) if self._shuffle else place

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))

    def _tokenize(self, number: int) -> tuple[str, tuple[int, ...], Mapping[str, Any]]:
        row = self._rows[number]
        text, bare = self._render(number, row)
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=bare))
        return text, tokens, row.columns

    def _render(self, number: int, row: Row) -> tuple[str, bool]:
        """Returns the text of a row, and True if it still lacks special tokens because no chat template made it."""
        if row.messages is not None and self._tokenizer.chat_template is not None:
            try:
                messages = [dict(message) for message in row.messages]
                tools = {"tools": [dict(tool) for tool in row.tools]} if row.tools else {}
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **tools
                )
            except Exception as error:  # a template may raise anything
                raise RecipeError(f"{self._called(number)}: the chat template refused it: {error}") from error
            return text, False
        if row.text is None:
            raise RecipeError(
                f"{self._called(number)} has `messages`, but the tokenizer of `model.path` has no chat "
                "template; give a `prompt` instead, or use a model that was tuned to chat"
            )
        return row.text, True

    def _check_all(self, most_s: float) -> int:
        """Checks rows in the order of the draw for about `most_s` seconds; returns how many were checked."""
        ends = time.monotonic() + most_s
        done = 0
        while done < len(self._rows) and (done == 0 or time.monotonic() < ends):
            some = range(done, min(done + CHECKED_AT_ONCE, len(self._rows)))
            self._check([self.row_number(index) for index in some])
            done = some.stop
        return done

    def _check(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        for number in numbers:
            self._check_roles(number)
            self._check_tools(number)
        rendered = [(number, *self._render(number, self._rows[number])) for number in numbers]
        for is_bare in (True, False):
            some = [(number, text) for number, text, bare in rendered if bare == is_bare]
            if some:
                encoded = self._tokenizer([text for _, text in some], add_special_tokens=is_bare)["input_ids"]
                for (number, text), tokens in zip(some, encoded, strict=True):
                    self._check_length(number, len(tokens))
                    self._count_unknown(number, text, tokens)

    def _called(self, number: int) -> str:
        """Returns a row's name for errors: its line in its file (held-out rows shift the numbers), or its number."""
        return self._rows[number].where or f"row {number + 1} of {self._name}"

    def _check_roles(self, number: int) -> None:
        """Refuses a role that the chat template does not know: most templates pass over it without a word."""
        template = self._tokenizer.chat_template
        for message in self._rows[number].messages or () if template is not None else ():
            role = message["role"]
            if role not in ROLES and role not in str(template):
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; usual roles are {', '.join(ROLES)}"
                raise RecipeError(f"{self._called(number)}: a message has the role `{role}`, which is no role{hint}")

    def _check_tools(self, number: int) -> None:
        """Refuses tools that the chat template does not show: the model would never see them."""
        template = self._tokenizer.chat_template
        if self._rows[number].tools and template is not None and "tools" not in str(template):
            raise RecipeError(
                f"{self._called(number)} has `tools`, but the chat template of `model.path` does not show tools; "
                "use a model that was tuned to call them, or describe them in the messages"
            )

    def _count_unknown(self, number: int, text: str, tokens: Sequence[int]) -> None:
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in tokens:
            return
        self.num_unknown += 1
        if not self.first_unknown:
            encode = self._tokenizer.encode
            first = (part for part in text if unknown in encode(part, add_special_tokens=False))
            self.first_unknown = f"`{next(first, text[:20])}` in {self._called(number)}"

    def _check_length(self, number: int, length: int) -> None:
        if length == 0:
            raise RecipeError(f"{self._called(number)}: its prompt is empty")
        if length > self._max_prompt_tokens:
            raise RecipeError(
                f"{self._called(number)}: its prompt has {length} tokens, more than the "
                f"{self._max_prompt_tokens} that the context (or `rollout.kv_tokens`) leaves beside `max_tokens`; "
                "lower that, or shorten or remove the row"
            )
        self.longest_checked = max(self.longest_checked, length)


def split_held_out(rows: Sequence[Row], num: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Splits off `num` random rows for evaluation. Returns (training rows, evaluation rows), both in order."""
    if not 0 <= num < len(rows):
        raise RecipeError(f"{num} of {len(rows)} rows cannot be held out for evaluation: nothing is left to train on")
    held = set(np.random.default_rng([seed, len(rows)]).permutation(len(rows))[:num].tolist())
    train = [row for number, row in enumerate(rows) if number not in held]
    return train, [row for number, row in enumerate(rows) if number in held]


# -- files -------------------------------------------------------------------------------------------------------------


def load_rows(path: Path, option: str = "task.path") -> list[Row]:
    """Reads the rows of a `.jsonl` or `.parquet` file.

    Each has a column `prompt` or `messages`; the other columns go to the reward function. `option` is the recipe's key
    that names the file, for error messages.
    """
    try:
        records = _read(path, option)
    except OSError as error:
        raise RecipeError(
            f"`{path}` cannot be read: {error.strerror}; `{option}` names a file that you may read"
        ) from error
    rows = [to_row(record, where) for where, record in records]
    if not rows:
        raise RecipeError(f"`{path}` has no rows; there is nothing to ask the model")
    return rows


def _read(path: Path, option: str) -> list[tuple[str, Any]]:
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a file"
        hint = " (`~` is not expanded, write the whole path)" if str(path).startswith("~") else ""
        raise RecipeError(f"`{path}` is {kind}; `{option}` names a `.jsonl` or `.parquet` file{hint}")
    match path.suffix:
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path)
        case suffix:
            raise RecipeError(f"`{path}` ends in `{suffix}`; `{option}` names a `.jsonl` or `.parquet` file")


def _read_jsonl(path: Path) -> list[tuple[str, Any]]:
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()  # may begin with a mark
                if text:
                    records.append((where, _parsed(text, where)))
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise RecipeError(f"{where}: this line is not JSON: {error}") from error
    return records


def _parsed(text: str, where: str) -> Any:
    record = json.loads(text)
    if "\\u" in text:  # JSON can write half of a character, which no tokenizer takes
        try:
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RecipeError(
                f"{where}: `\\u{ord(error.object[error.start]):04x}` is half of a character (a lone surrogate); write "
                "the other half after it, or remove it"
            ) from error
    return record


def _read_parquet(path: Path) -> list[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RecipeError(f"reading `{path}` needs pyarrow: `pip install 'stretto[parquet]'`") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"`{path}` cannot be read as Parquet: {error}") from error
    return [(f"{path}:{number}", record) for number, record in enumerate(table.to_pylist(), start=1)]


def to_row(record: Any, where: str) -> Row:
    """Checks one record of a file and returns it as a row; `where` is its place in error messages."""
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: a row is an object with named columns, this is {type(record).__name__}")
    columns = dict(record)
    text = columns.pop("prompt", None)
    messages = columns.pop("messages", None)
    if text is not None and messages is not None:
        raise RecipeError(
            f"{where}: a row has a column `prompt` or a column `messages`, but this has both; remove one of them"
        )
    empty = sorted({"prompt", "messages"} & record.keys())
    if text is None and messages is None and empty:
        raise RecipeError(f"{where}: `{empty[0]}` is null; give it a value, or remove the row")
    if text is None and messages is None:
        raise RecipeError(f"{where}: a row has a column `prompt` or a column `messages`, this has {sorted(record)}")
    if "completion" in columns:
        raise RecipeError(
            f"{where}: the name `completion` is reserved for what the model generates; rename the column, for example "
            "to `answer`"
        )
    if messages is not None:
        tools = _check_tools(columns.get("tools"), where)
        if tools:
            columns["tools"] = [dict(tool) for tool in tools]
        return Row(messages=_check_messages(messages, where), columns=columns, tools=tools, where=where)
    if not isinstance(text, str):
        raise RecipeError(f"{where}: `prompt` is a string, this is {type(text).__name__}")
    return Row(text=text, columns=columns, where=where)


def _check_messages(messages: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise RecipeError(
            f"{where}: `messages` is a list of objects with `role` and `content`, this is {messages!r:.80}"
        )
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise RecipeError(f"{where}: a message has a `role` and a `content`, both strings, this is {message!r:.80}")
    if messages[-1]["role"] == "assistant":
        raise RecipeError(
            f"{where}: the last of `messages` has the role `assistant`; end with a message that the model answers"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _check_tools(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a row with messages. In a Parquet file, whose columns have one type, they may be JSON."""
    said = f"{where}: `tools` is a list of functions, as the OpenAI API describes them, or such a list as JSON"
    given = tools
    if isinstance(tools, str):
        try:
            given = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise RecipeError(f"{said}; this is {tools!r:.80}") from error
    if given is None:
        return ()
    if not isinstance(given, list):
        raise RecipeError(f"{said}; this is {given!r:.80}")
    for tool in given:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecipeError(f"{said}; one of them is {tool!r:.80}")
    return tuple(given)
