"""The question to a judge, made from a template, and the score that is found in its answer. Pure functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
OWN = ("prompt", "completion")  # placeholders beside the columns of the row
_PLAIN = r"\d+(?:\.\d+)?"
_WHOLE = r"(?![\w]|[.,]\d)"  # not part of a word, of a date or of a longer number
_GAP = r"[\s*_`(]*"  # between the parts of `**7** (out of 10)`
NUMBER = re.compile(
    rf"(?<![\w.,/])(?P<score>[-+]?{_PLAIN}){_WHOLE}(?:{_GAP}(?:/|out of|of){_GAP}(?P<most>{_PLAIN}){_WHOLE})?"
    # The highest score, as in `7 points out of 10` or `7 on a scale from 1 to 10`.
    rf"|\b(?:out of|scale (?:of|from)){_GAP}(?:{_PLAIN}\s*(?:-|\u2013|to)\s*)?(?P<alone>{_PLAIN}){_WHOLE}"
)
THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
SHOWN = 400  # characters of an answer in an error


class UnclearError(Exception):
    """An answer has no score, or one that is not allowed."""


class Question:
    """A template in which `{prompt}`, `{completion}` and columns of the row are replaced.

    `{{` and `}}` are single braces. Braces around anything but a name stay as they are, so that a template may show
    JSON.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    @property
    def names(self) -> list[str]:
        """The placeholders, each once, in their order."""
        found = (match[1] for match in PLACEHOLDER.finditer(self._template) if match[1] is not None)
        return list(dict.fromkeys(found))

    def problem(self, columns: Mapping[str, str | None]) -> str | None:
        """Returns why it cannot be filled in from rows with these columns; None if it can.

        `columns` maps each column to a row that lacks it, or to None if all rows have it.
        """
        if "completion" not in self.names:
            return "it has no `{completion}`: the judge would not see what it is to score"
        known = [*OWN, *(name for name in columns if name not in OWN)]
        for name in self.names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean `{{{near[0]}}}`?" if near else f"there are {_listed(known)}"
                return f"it has `{{{name}}}`, and rows have no such column; {hint} (`{{{{` is a brace)"
            if name not in OWN and (lacking := columns[name]) is not None:
                return f"it has `{{{name}}}`, a column that {lacking} does not have"
        return None

    def fill(self, values: Mapping[str, Any]) -> str:
        """Returns the text with every placeholder replaced."""
        return PLACEHOLDER.sub(lambda match: _replaced(match, values), self._template)


def _replaced(match: re.Match[str], values: Mapping[str, Any]) -> str:
    return match[0][0] if match[1] is None else str(values[match[1]])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{{{name}}}`" for name in names)


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation as plain text: the only message as it is, several with their roles before them."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


class Scale:
    """Finds a number between a lowest and a highest score, and returns its place between them, from 0 to 1."""

    def __init__(self, low: float, high: float, pattern: str | None = None) -> None:
        self._low, self._high = low, high
        ends = (re.escape(f"{low:g}"), re.escape(f"{high:g}"))
        self._range = re.compile(rf"(?<![\w.]){ends[0]}\s*(?:-|\u2013|\.\.+|to)\s*{ends[1]}(?!\w)")  # no score
        self._pattern = None if pattern is None else re.compile(pattern)
        self.wanted = f"a number from {low:g} to {high:g}"

    def reward(self, answer: str) -> float:
        """Returns the reward. Raises `UnclearError` if there is no score, or one outside of the scale."""
        text = _without_thoughts(answer)
        if self._pattern is not None:
            found = _last_group(self._pattern, text)
            try:
                score = float(found)
            except ValueError as error:
                raise UnclearError(f"`{found}` is not a number") from error
        else:
            number, most = _last_number(self._range.sub("", text))
            if most is not None and float(most) != self._high:
                raise UnclearError(f"it is a score of at most {float(most):g}, and not {self._high:g}")
            score = float(number)
        if not self._low <= score <= self._high:
            raise UnclearError(f"its score {score:g} is outside of {self._low:g} to {self._high:g}")
        return (score - self._low) / (self._high - self._low)


class Choices:
    """Finds one of some words, and returns its reward."""

    def __init__(self, choices: Mapping[str, float], pattern: str | None = None) -> None:
        self._rewards = dict(choices)
        self._pattern = None if pattern is None else re.compile(pattern)
        self.wanted = "one of " + ", ".join(self._rewards)

    def reward(self, answer: str) -> float:
        """Returns the reward. Raises `UnclearError` if none of the words is there."""
        text = _without_thoughts(answer)
        if self._pattern is not None:
            found = _last_group(self._pattern, text).strip()
            if found not in self._rewards:
                raise UnclearError(f"`{found}` is not {self.wanted}")
            return self._rewards[found]
        words = sorted(self._rewards, key=len, reverse=True)  # the longest first: one may begin with another
        alone = text.strip().strip("*_`\"'().:[] \n")
        if alone in self._rewards:
            return self._rewards[alone]
        if exact := _standing_alone(words, text, re.NOFLAG):
            return self._rewards[exact[-1]]
        if similar := _standing_alone([word for word in words if len(word) > 1], text, re.IGNORECASE):
            return next(reward for word, reward in self._rewards.items() if word.lower() == similar[-1].lower())
        raise UnclearError(f"it has none of {', '.join(self._rewards)}")


def _without_thoughts(answer: str) -> str:
    """Returns an answer without the thoughts before it. Raises `UnclearError` if there is nothing but thoughts."""
    text = THOUGHTS.sub("", answer)
    if text.lstrip().startswith("<think>"):
        raise UnclearError("its thoughts do not end")
    return text


def _last_number(text: str) -> tuple[str, str | None]:
    """Returns the last number of a text, and the highest that it says there is. Raises `UnclearError` without one."""
    number, most = None, None
    for match in NUMBER.finditer(text):
        if match["score"] is not None:
            number, most = match["score"], match["most"]
        else:
            most = match["alone"]
    if number is None:
        raise UnclearError("it has no number")
    return number, most


def _standing_alone(words: Sequence[str], text: str, flags: re.RegexFlag) -> list[str]:
    """Returns the places of a text that are one of some words, and not part of another word."""
    if not words:
        return []
    return re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)", text, flags)


def _last_group(pattern: re.Pattern[str], text: str) -> str:
    found = [match[1] for match in pattern.finditer(text) if match[1] is not None]
    if not found:
        raise UnclearError("`pattern` does not match it")
    return str(found[-1])


def shown(answer: str) -> str:
    """Returns an answer for an error: its end, where the score should be, if it is long."""
    return repr(answer) if len(answer) <= SHOWN else f"...{answer[-SHOWN:]!r}"
