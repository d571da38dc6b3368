"""Turns rows into the text and tokens of prompts, and finds those of which it cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.row_faults import half_character, named
from stretto.environments.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # beside those that a chat template names
TOO_LONG_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # the name that transformers gives it
SHOWN_LONG = 5  # prompts that are too long, in messages


class UnrenderableRowError(Exception):
    """A row that cannot become a prompt; its text follows the place of the row in a sentence."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model sees it."""

    text: str
    tokens: tuple[int, ...]


class PromptRenderer:
    """Renders rows with a tokenizer: messages through its chat template, a text as it is."""

    def __init__(self, tokenizer: Any, *, keep_last: int | None = None) -> None:
        """`keep_last`: tokens that a prompt keeps, from its end; None: all."""
        self._tokenizer = tokenizer
        self._keep_last = keep_last
        self._unknown = _unknown_id(tokenizer)
        said = getattr(tokenizer, "deprecation_warnings", None)
        if isinstance(said, dict):  # prompts that are too long are refused, dropped or cut here, with words of our own
            said[TOO_LONG_WARNING] = True

    @property
    def has_template(self) -> bool:
        """True if messages can be rendered."""
        return self._tokenizer.chat_template is not None

    def render(self, row: Row) -> RenderedPrompt:
        """Returns the prompt of a row. Raises `UnrenderableRowError` if it has none."""
        text, bare = self._text(row)
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=bare))
        if self._keep_last is None or len(tokens) <= self._keep_last:
            return RenderedPrompt(text, tokens)
        kept = tokens[-self._keep_last :]
        return RenderedPrompt(str(self._tokenizer.decode(list(kept), skip_special_tokens=False)), kept)

    def checked(self, rows: Sequence[Row]) -> list[CheckedRow]:
        """Renders rows together, which is faster, and returns what was found about each. Nothing is cut."""
        found = [CheckedRow() for _ in rows]
        rendered = {number: self._tried(row, found[number]) for number, row in enumerate(rows)}
        for is_bare in (True, False):
            some = [(number, each[0]) for number, each in rendered.items() if each is not None and each[1] == is_bare]
            if some:
                encoded = self._tokenizer([text for _, text in some], add_special_tokens=is_bare)["input_ids"]
                for (number, text), tokens in zip(some, encoded, strict=True):
                    found[number].length = len(tokens)
                    found[number].unknown = text if self._unknown in tokens else None
                    if not tokens:
                        found[number].fault = "its prompt is empty"
        return found

    def _tried(self, row: Row, found: CheckedRow) -> tuple[str, bool] | None:
        found.fault = next(self._faults(row), None)
        if found.fault is not None:
            return None
        try:
            text, bare = self._text(row)
            text.encode("utf-8")  # rows that are given from Python may have what no file has
            return text, bare
        except UnrenderableRowError as error:
            found.fault = str(error)
        except UnicodeEncodeError as error:
            found.fault = half_character(error)
        return None

    def _text(self, row: Row) -> tuple[str, bool]:
        """Returns the text of a row, and True if it still lacks special tokens because no chat template made it."""
        if row.messages is not None and self.has_template:
            try:
                messages = [dict(message) for message in row.messages]
                tools = {"tools": [dict(tool) for tool in row.tools]} if row.tools else {}
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **tools
                )
            except Exception as error:  # a template may raise anything
                raise UnrenderableRowError(f"the chat template refused it: {error}") from error
            return str(text), False
        if row.text is None:
            raise UnrenderableRowError(
                "it has `messages`, but the tokenizer of `model.path` has no chat template; give a `prompt` instead, "
                "name a template in `task.chat_template`, or use a model that was tuned to chat"
            )
        return row.text, True

    def _faults(self, row: Row) -> Iterator[str]:
        """Yields what a template would pass over without a word: a role, or tools, that it does not show."""
        template = self._tokenizer.chat_template
        for message in row.messages or () if template is not None else ():
            role = message["role"]
            if role not in ROLES and role not in str(template):
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; usual roles are {', '.join(ROLES)}"
                yield f"a message has the role `{role}`, which is no role{hint}"
        if row.tools and template is not None and "tools" not in str(template):
            yield (
                "it has `tools`, but the chat template of `model.path` does not show tools; use a model that was tuned "
                "to call them, or describe them in the messages"
            )

    def unknown_part(self, text: str) -> str:
        """Returns the first character of a text that the tokenizer does not know."""
        encode = self._tokenizer.encode
        return next((part for part in text if self._unknown in encode(part, add_special_tokens=False)), text[:20])


def _unknown_id(tokenizer: Any) -> int | None:
    """Returns the token that stands for text which a tokenizer does not know; None if it has none.

    A tokenizer may use one in its model without naming it among its special tokens.
    """
    named_id: int | None = getattr(tokenizer, "unk_token_id", None)
    if named_id is not None:
        return named_id
    inner = getattr(tokenizer, "backend_tokenizer", None)
    token = getattr(getattr(inner, "model", None), "unk_token", None)
    found: int | None = None if inner is None or token is None else inner.token_to_id(token)
    return found


@dataclass(slots=True)
class CheckedRow:
    """The findings of the check of one row."""

    fault: str | None = None  # why it cannot be used; follows its place in a sentence
    length: int = 0  # tokens of its prompt
    unknown: str | None = None  # its text, if the tokenizer does not know all of it


@dataclass(slots=True)
class LongPrompts:
    """The prompts that are too long, of those that were checked."""

    limit: int  # tokens
    num: int = 0
    longest: int = 0  # tokens
    first: list[tuple[str, int]] = field(default_factory=list)  # the places of a few, and their tokens

    def add(self, place: str, length: int) -> None:
        """Notes a prompt."""
        self.num += 1
        self.longest = max(self.longest, length)
        if len(self.first) < SHOWN_LONG:
            self.first.append((place, length))

    @property
    def places(self) -> str:
        """The first of them, and the longest."""
        some = named([f"{place} ({length:,} tokens)" for place, length in self.first], self.num)
        return f"{some}; the longest has {self.longest:,}" if self.num > 1 else some

    def refusal(self, choices: Sequence[str]) -> str:
        """Returns why the prompts are refused, and what to do. `choices` are other values of `task.too_long`."""
        room = f"{self.limit:,} that the context (or `rollout.kv_tokens`) leaves beside `max_tokens`"
        other = " or ".join(f'`task.too_long = "{each}"`' for each in choices)
        choose = f", or set {other}" if choices else ""
        if self.num == 1:
            ((place, length),) = self.first
            return (
                f"{place}: its prompt has {length:,} tokens, more than the {room}; lower that, or shorten or remove "
                f"the row{choose}"
            )
        return (
            f"{self.num:,} prompts have more tokens than the {room}: {self.places}; lower that, or shorten or remove "
            f"the rows{choose}"
        )
