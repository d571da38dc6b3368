"""The question to a judge, made from a template, and the score that is found in its answer. Pure functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
TAG = re.compile(r"</?\w+>")
SENTENCE_END = re.compile(r"(?<=[.!?;])[*_`\"'\u2019\u201d)\]}]*\s+")
INTRODUCED = re.compile(r"[:\uff1a=\u2192]|->|=>")
INTRODUCED_AT_THE_END = re.compile(
    rf"{INTRODUCED.pattern}|\b(?:answer|verdict|choice|decision|judge?ment|conclusion|grade|rating|winner)\s+is\b",
    re.IGNORECASE,
)
# Before a number that is the score, and after one that has a line for itself.
SCORE_BEGIN = re.compile(
    r"\b(?:score|rating|grade|verdict|overall)[*_`]*\s*(?:[:\uff1a=]|\b(?:is|of)\b)[\s*_`(\[]*\Z", re.IGNORECASE
)
LINE_BEGIN, LINE_END = re.compile(r"(?:\A|\n)[ \t*_`#>]*\Z"), re.compile(r"[ \t*_`.!]*(?:\n|\Z)")
# Words before which `no` and `A` are themselves, and not an adjective or an article: `no and yes`, `A is right`.
_AFTER_A_NAME = (
    r"(?:and|or|nor|but|so|yet|because|since|as|although|though|while|whereas|when|if|unless|however|therefore|then|than"
    r"|to|for|from|in|on|at|of|with|by|over|is|was|are|were|be|has|had|does|did|would|will|can|could|may|might|must"
    r"|should|seems|means|wins|gave|here|there|it|its|this|that|these|those|the|an?|he|she|they|we|you|i|my|your|not"
    r"|never|also|only|yes|no)\b"
)
ADJECTIVE = re.compile(rf"[ \t]+(?!{_AFTER_A_NAME})[^\W\d_]", re.IGNORECASE)  # after `no`: `no doubt`
ARTICLE = re.compile(rf"[ \t]+(?!{_AFTER_A_NAME}|[a-z]+[b-hj-np-rtv-z]s\b)[a-z]")  # after `A`, but not in `A gives`
SENTENCE_BEGIN = re.compile(r"(?:\A|[.!?:;\n])[\s*_`\"'\u2018\u201c(>#\u2022-]*\Z")
NEGATED = re.compile(  # before a word: `not good`, `never a good`, `no reason to say yes`
    r"(?:(?:\b(?:not|never)|n['\u2019]t)\s+(?:(?:an?|the|very|really|quite)\s+)?"
    rf"|\bno[ \t]+(?!doubt\b|question\b|{_AFTER_A_NAME})"
    r"(?:(?!(?:and|so|but|thus|hence|because)\b)[^\W\d_]+[ \t]+){0,5})"
    r"[*_`\"'\u2018\u201c(]*\Z",
    re.IGNORECASE,
)
CLAUSE_END = re.compile(r"[.,;:!?\n]")
LIST_MARK = re.compile(r"\s*(?:[-*+\u2022]|\d{1,2}[.)])\s+")
MARKUP = "*_`\"'\u2018\u2019\u201c\u201d()[]{}<>#-\u2022.,:;! \t"  # around a verdict
LOOKED_BACK = 40  # characters before a word or a number, for a `not` or a `Score:`
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
    """Finds a number between a lowest and a highest score, and returns its place between them, from 0 to 1.

    The score is the last number that is written as one: with the highest score (`8/10`, `8 out of 10`), after `Score:`
    or a word like it, or on a line of its own. If there is none, it is the last number.
    """

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
            number, most = _last_score(self._range.sub("", text), self._high)
            if most is not None and float(most) != self._high:
                raise UnclearError(f"it is a score of at most {float(most):g}, and not {self._high:g}")
            score = float(number)
        if not self._low <= score <= self._high:
            raise UnclearError(f"its score {score:g} is outside of {self._low:g} to {self._high:g}")
        return (score - self._low) / (self._high - self._low)


@dataclass(frozen=True, slots=True)
class _Mention:
    """A place of an answer that is one of the choices."""

    words: tuple[str, ...]  # the choices that it may be: several if these differ in case only
    in_capitals: bool  # as the choice is
    is_negated: bool  # `not good`
    is_other_word: bool  # `no doubt`, `A good answer`


class Choices:
    """Finds one of some words, and returns its reward. Words with equal rewards count as one.

    1. If the answer names one word alone, that is the choice. `no doubt` and `A good answer` do not name `no` and `A`.
       `not good`, `never good` and `no reason to say good` do not name `good`, and an answer with one of them is not
       `good`, unless that is its verdict.
    2. Otherwise verdicts count: a word that has a line or a sentence for itself, or is all that follows a colon, or
       ends the answer after `the answer is`. A letter is a verdict at the end of a line only: `A. ...` may be a list.
       Verdicts of the last line win; if it has none, all verdicts must agree. A list of all choices at the end, one a
       line, is no verdict.
    3. Without a verdict, words in capitals count, if the choices are written in capitals.
    4. If all of this leaves none or several, the answer is unclear.

    Case is ignored, except for single letters and for choices that differ in case only.
    """

    def __init__(self, choices: Mapping[str, float], pattern: str | None = None) -> None:
        self._rewards = dict(choices)
        self._pattern = None if pattern is None else re.compile(pattern)
        longest_first = sorted(self._rewards, key=len, reverse=True)  # one may begin with another
        any_of = "|".join(re.escape(word) if len(word) == 1 else f"(?i:{re.escape(word)})" for word in longest_first)
        self._words = re.compile(rf"(?<!\w)(?:{any_of})(?!\w)")
        self.wanted = "one of " + ", ".join(self._rewards)

    def reward(self, answer: str) -> float:
        """Returns the reward. Raises `UnclearError` if none of the words is there, or none of several counts."""
        text = _without_thoughts(answer)
        if self._pattern is not None:
            found = _last_group(self._pattern, text).strip()
            if found not in self._rewards:
                raise UnclearError(f"`{found}` is not {self.wanted}")
            return self._rewards[found]
        mentions = self._mentions(text)
        named = [each for each in mentions if not each.is_negated and not each.is_other_word]
        negated = {self._rewards[word] for each in mentions if each.is_negated for word in each.words}
        reward = self._common(word for each in named for word in each.words)
        if reward is not None and reward not in negated:
            return reward
        counted = self._verdicts(text)
        if not counted:
            counted = [word for each in named if each.in_capitals for word in each.words]
        if (reward := self._common(counted)) is not None:
            return reward
        if not mentions:
            raise UnclearError(f"it has none of {', '.join(self._rewards)}")
        words = dict.fromkeys(word for each in mentions for word in each.words)
        raise UnclearError(f"it names {', '.join(words)} without a clear verdict")

    def _common(self, words: Iterable[str]) -> float | None:
        """Returns the reward of all of some words; None if there are none, or they differ."""
        rewards = {self._rewards[word] for word in words}
        return rewards.pop() if len(rewards) == 1 else None

    def _mentions(self, text: str) -> list[_Mention]:
        return [
            _Mention(
                words=self._written_as(match[0]),
                in_capitals=len(match[0]) > 1 and match[0].isupper() and match[0] in self._rewards,
                is_negated=NEGATED.search(text, max(0, match.start() - LOOKED_BACK), match.start()) is not None,
                is_other_word=_is_other_word(text, match),
            )
            for match in self._words.finditer(text)
        ]

    def _verdicts(self, text: str) -> list[str]:
        """Returns the words that are verdicts: those of the last line, or if it has none, of all lines."""
        if self._ends_with_all(text):
            return []
        lines = [line for line in TAG.sub("\n", text).splitlines() if line.strip(MARKUP)]
        found = [self._verdicts_of(line, is_last=place == len(lines)) for place, line in enumerate(lines, 1)]
        return found[-1] or [word for words in found for word in words] if found else []

    def _ends_with_all(self, text: str) -> bool:
        """Returns whether the last lines are a list of all choices."""
        lines = [line for line in text.splitlines() if line.strip(MARKUP)]
        left, has_marks = set(self._rewards), bool(lines) and LIST_MARK.match(lines[-1]) is not None
        for line in reversed(lines):
            mark = LIST_MARK.match(line)
            words = self._alone(line if mark is None else line[mark.end() :])
            if not words or (mark is not None) != has_marks:
                break
            left.difference_update(words)
        return not left and len(self._rewards) > 1

    def _verdicts_of(self, line: str, *, is_last: bool) -> list[str]:
        *sentences, end = SENTENCE_END.split(line.strip())
        introduced = INTRODUCED_AT_THE_END if is_last else INTRODUCED
        found = list(self._alone(introduced.split(end)[-1]))
        for sentence in sentences:
            found += (word for word in self._alone(INTRODUCED.split(sentence)[-1]) if len(word) > 1)
        return found

    def _alone(self, text: str) -> tuple[str, ...]:
        """Returns the choices that a text is, but for marks around it; a question is none."""
        return self._written_as(text.strip()) or self._written_as(text.strip(MARKUP))

    def _written_as(self, text: str) -> tuple[str, ...]:
        """Returns the choices that a text may be: the one that is spelled so, or those that differ in case."""
        if text in self._rewards or len(text) < 2:
            return (text,) if text in self._rewards else ()
        return tuple(word for word in self._rewards if re.fullmatch(re.escape(word), text, re.IGNORECASE))


def _is_other_word(text: str, match: re.Match[str]) -> bool:
    """Returns whether a word is spelled as a choice, but is the adjective `no` or the article `A`."""
    if match[0].lower() == "no":
        return ADJECTIVE.match(text, match.end()) is not None
    if match[0] != "A" or ARTICLE.match(text, match.end()) is None:
        return False
    return SENTENCE_BEGIN.search(text, max(0, match.start() - LOOKED_BACK), match.start()) is not None


def _without_thoughts(answer: str) -> str:
    """Returns an answer without the thoughts before it. Raises `UnclearError` if there is nothing but thoughts."""
    text = THOUGHTS.sub("", answer)
    if text.lstrip().startswith("<think>"):
        raise UnclearError("its thoughts do not end")
    return text


@dataclass(slots=True)
class _Number:
    """A number of an answer."""

    text: str
    most: str | None  # the highest score, if the answer says it
    is_score: bool  # by the way it is written


def _last_score(text: str, high: float) -> tuple[str, str | None]:
    """Returns the score in a text, and the highest that it says there is. Raises `UnclearError` without a number."""
    numbers: list[_Number] = []
    end = 0  # of the last number
    for match in NUMBER.finditer(text):
        most = match["most"] or match["alone"]
        is_of_high = most is not None and float(most) == high
        if match["score"] is not None:
            numbers.append(_Number(match["score"], most, is_of_high or _is_marked(text, match)))
            end = match.end()
        elif numbers:  # `7 points out of 10`; in `2 faults. On a scale of 10, it is a 7` it is about another number
            numbers[-1].most = most
            numbers[-1].is_score |= is_of_high and not CLAUSE_END.search(text, end, match.start())
    if not numbers:
        raise UnclearError("it has no number")
    found = next((number for number in reversed(numbers) if number.is_score), numbers[-1])
    return found.text, found.most


def _is_marked(text: str, match: re.Match[str]) -> bool:
    """Returns whether a number follows `Score:` or a word like it, or has a line for itself."""
    before = max(0, match.start() - LOOKED_BACK), match.start()
    if SCORE_BEGIN.search(text, *before):
        return True
    return LINE_BEGIN.search(text, *before) is not None and LINE_END.match(text, match.end()) is not None


def _last_group(pattern: re.Pattern[str], text: str) -> str:
    found = [match[1] for match in pattern.finditer(text) if match[1] is not None]
    if not found:
        raise UnclearError("`pattern` does not match it")
    return str(found[-1])


def shown(answer: str) -> str:
    """Returns an answer for an error: its end, where the score should be, if it is long."""
    return repr(answer) if len(answer) <= SHOWN else f"...{answer[-SHOWN:]!r}"
