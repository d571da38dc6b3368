r"""A reward for mathematics: 1 if the answer is right, otherwise 0.

    [task]
    type = "file"
    path = "data/gsm8k/train.jsonl"                                 # `python examples/gsm8k.py` makes it
    reward = "stretto.environments.rewards.mathematics:reward"      # or `:boxed`, for which only a box counts

The answer of a completion is its last complete `\boxed{...}`, else the last number in its text. It is right if it is
the same number as the column `answer`, however each of them is written:

| written as                         | is the number                                             |
|------------------------------------|-----------------------------------------------------------|
| `1,234`, `1{,}234`, `1\,234`       | 1234                                                      |
| `18.00`, `18.`, `+18`              | 18                                                        |
| `\frac{3}{4}`, `\frac34`, `3/4`    | 3/4                                                       |
| `2\frac{1}{2}`, `2 1/2`            | 5/2                                                       |
| `50\%`, `50 percent`               | 50, or 1/2 if the other side is no percentage             |
| `\$18`, `18 dollars`, `x = 18`     | 18                                                        |
| `-(18)`, `- 18`                    | -18; `20 - 18` and `n - 18` have no negative number       |
| `25\text{ cm}^2`, `90^\circ`       | 25, 90: a unit is not compared                            |
| `3 \times 10^4`, `3e4`             | 30000                                                     |

Numbers are compared exactly, as fractions. Commas separate thousands, points decimals; `(1,100)` in brackets and
`0,100` are two numbers. If a side is no single number (`2x + 1`, `\sqrt{5}`, `(1, 2)`, `n < 5`, `5!`, `1011_2`,
`x = 5, y = 6`), both are compared as text, without spaces and LaTeX that only changes how it looks. If the texts differ
and `answer` is no number, the package math-verify decides whether they are the same expression, if it is installed
(`pip install 'stretto[math-verify]'`): `\frac{\sqrt{12}}{2}` is `\sqrt{3}`. An expression for a number is not the
number: `\boxed{6 * 200}` leaves the work to the reader.

Every expression here takes time linear in the text, and no text makes it raise. math-verify has `SYMBOLIC_S` seconds
for each of its three steps, by an alarm signal. Signals need the main thread, which rewards have in their processes;
elsewhere math-verify is not asked.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 60  # a longer number is no answer, and would only cost time
MAX_EXPONENT = 99
MAX_SYMBOLIC = 500  # characters of an expression that math-verify compares
SYMBOLIC_S = 2

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_INVISIBLE = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[!;: ])|\\[()\[\]]|[$€£¥₹]|\\[$€£]")
_DEGREES = re.compile(r"\^\s*(?:\{\s*)?\\circ\s*\}?|\\degree|°")
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3})")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([0-9]{1,60})\s*\}|([0-9]))\s*(?:\{\s*([0-9]{1,60})\s*\}|([0-9]))")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9])")
_EQUALS = re.compile(r"=|\\approx|≈")
_RELATION = re.compile(r"[<>≤≥≠]|!=")
# Between two `=`: another equation begins (`x = 5, y = 6`). Without it, the last side is the result (`10/2 = 5`).
_ANOTHER_EQUATION = re.compile(r"[,;](?![0-9]{3})|\b(?:and|or)\b|(?<![A-Za-z])[A-Za-z]\s*\Z")
_SUBSCRIPT = re.compile(r"_\{([A-Za-z0-9]{1,9})\}")
_IN_BASE = re.compile(r"[0-9]\s*_")  # `1011_2`: math-verify takes it for 1011
# A sign that stands apart from its number, at the end of the text before it: `- 5`, `-(5)`.
_SIGN_APART = re.compile(r"([-+])([\s(\[{]*)\Z")
# Text before a sign: after an operand it is an operator (`n - 5`, `(a) - 5`), but a word may introduce a number.
_INTRODUCED = re.compile(r"\b(?:is|are|was|be|equals|to|of|by|at|and|or|than|about|exactly)\Z", re.IGNORECASE)
_OPERAND = re.compile(r"[^\W_]\Z|[)}\]%]\Z")
_VARIABLE = re.compile(r"(?<![A-Za-z])[A-Za-z]\Z")
# Text around a number that makes the whole an expression, or no number at all: `\sqrt{5}`, `5x`, `5^n`, `5!`, `1.2.3`.
_EXPRESSION = re.compile(
    r"\\[A-Za-z]|[√π∞^+±!_|]|(?<![A-Za-z])[eijknxyz](?![A-Za-z]|-[A-Za-z]{2})|-\s*[A-Za-z](?![A-Za-z])|\.[0-9]"
)
# The same of text before it only: `log 100`, `f(5)`, `a/5`.
_FUNCTION = re.compile(
    r"\b(?:log|ln|lg|sin|cos|tan|cot|exp|sqrt|root)\b|[A-Za-z]\(\s*\Z|[/×÷·]\s*\Z",  # noqa: RUF001
    re.IGNORECASE,
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]")  # directly after it
_OPENED, _CLOSED = re.compile(r"(?:[(\[]|\\\{)\s*\Z"), re.compile(r"\s*(?:[)\]]|\\\})")

_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|(?<!\.)\.[0-9]+"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_^])(?<![0-9]\.)(?<!\^\{{)            # no digit of a name, of a power or of another number
    (?P<sign>(?:(?<![)}}%])[-+])?)                      # `20-5` and `20 - 5` have no negative number
    (?:
        (?:(?P<whole>[0-9]{{1,60}})\s*)?                # of a mixed number
        \\frac\s*\{{\s*(?P<above>[-+]?(?:{_PLAIN}))\s*\}}\s*\{{\s*(?P<below>[-+]?(?:{_PLAIN}))\s*\}}
      | (?P<mixed>[0-9]{{1,60}})\s+(?P<top>[0-9]{{1,60}})\s*/\s*(?P<bottom>[0-9]{{1,60}})(?![0-9.,/])
      | (?P<value>{_PLAIN})
        (?:
            \s*(?:\\times|\\cdot|[x\u00d7*])\s*10\s*\^\s*(?:\{{\s*)?(?P<power>[-+]?[0-9]{{1,3}})\s*\}}?
          | [eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![A-Za-z0-9])
          | \s*/\s*(?P<divisor>{_PLAIN})
        )?
    )
    (?P<percent>\s*(?:\\?%|percent\b))?
    """,
    re.VERBOSE,
)


class Number(NamedTuple):
    """A number as it was written: `50%` is 50 with `is_percent`."""

    value: Fraction
    is_percent: bool


def reward(prompt: str, completion: str, *, answer: str | float, **row: object) -> float:
    """Returns 1 if the last box, or without one the last number, is `answer`; else 0."""
    found = last_boxed(completion)
    return float(matches(last_number(completion) if found is None else found, str(answer)))


def boxed(prompt: str, completion: str, *, answer: str | float, **row: object) -> float:
    """Returns 1 if the last box is `answer`, else 0. A completion without a box earns nothing."""
    return float(matches(last_boxed(completion), str(answer)))


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces are closed; None if there is none."""
    opened: list[int | None] = []  # of every open brace: where the content of a box begins, or None
    last: slice | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(None)
        elif token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                last = slice(start, match.start())
        elif len(token) > 2:  # a box: an escaped character has two
            opened.append(match.end())
    return None if last is None else text[last]


def last_number(text: str) -> str | None:
    """The last number in a text, as it is written there, with its sign; None if there is none."""
    plain, end, last = _plain(text), 0, None
    for match in _NUMBER.finditer(plain):
        sign, _ = _signed(match, plain[end : match.start()], is_first=last is None)
        if sign is None:  # an operator before it: `20 - 5`
            sign = match["sign"]
        last, end = sign + match.group()[len(match["sign"]) :], match.end()
    return last


def matches(found: str | None, answer: str) -> bool:
    """Returns whether two answers are the same number, or the same text if one of them is no number."""
    if found is None or not found.strip():
        return False
    ours, theirs = parse_number(found), parse_number(answer)
    if ours is None or theirs is None:
        return _as_text(found) == _as_text(answer) or (theirs is None and _same_expression(found, answer))
    if ours.is_percent == theirs.is_percent:
        return ours.value == theirs.value
    percentage, other = (ours, theirs) if ours.is_percent else (theirs, ours)
    return other.value in (percentage.value, percentage.value / 100)


def _same_expression(found: str, answer: str) -> bool:
    """Returns whether math-verify can show that two expressions are equal; False without it."""
    if max(len(found), len(answer)) > MAX_SYMBOLIC or threading.current_thread() is not threading.main_thread():
        return False
    if _IN_BASE.search(found) or _IN_BASE.search(answer) or not _has_math_verify():
        return False
    from math_verify import parse, verify  # not before: it imports sympy, which takes a second

    ours, theirs = (parse(f"\\boxed{{{text}}}", parsing_timeout=SYMBOLIC_S) for text in (found, answer))
    return bool(ours and theirs and verify(theirs, ours, timeout_seconds=SYMBOLIC_S))


@functools.cache
def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def parse_number(text: str) -> Number | None:
    """The one number of a text, with words, currency and units around it; None if it has several, or an expression."""
    plain = _plain(text)
    if _RELATION.search(plain):
        return None
    sides = _EQUALS.split(plain)
    if any(_ANOTHER_EQUATION.search(side) for side in sides[1:-1]):
        return None
    plain = sides[-1] if sides[-1].strip() else plain
    found = list(_NUMBER.finditer(plain))
    if len(found) != 1:
        return None
    (match,) = found
    sign, before = _signed(match, plain[: match.start()], is_first=True)
    after = plain[match.end() :]
    if sign is None or _EXPRESSION.search(f"{before} {after}") or _FUNCTION.search(before) or _RAISED.match(after):
        return None
    is_grouped = "," in (match["value"] or "")
    if is_grouped and _OPENED.search(plain[: match.start()]) and _CLOSED.match(after):  # `(1,100)` is a pair
        return None
    value = _value(match)
    if value is None:
        return None
    return Number(-value if sign == "-" else value, match["percent"] is not None)


def _signed(match: re.Match[str], before: str, *, is_first: bool) -> tuple[str | None, str]:
    """Returns the sign of a number (`-`, or nothing), and the text before the sign.

    The sign is None if a `-` or `+` before the number is an operator between it and something else. `before` is the
    text from the number before, or if `is_first`, from the beginning.
    """
    sign, apart = match["sign"], _SIGN_APART.search(before)
    if apart is None:
        return (None if sign and _VARIABLE.search(before.rstrip()) else sign.replace("+", "")), before
    left = before[: apart.start()]
    words = left.rstrip("*_` \t\n")
    is_item = apart[2][:1].isspace() and "\n" in left[len(words) :]  # `- 5` on a line of its own
    is_operand = not is_first if not words else _OPERAND.search(words) and not _INTRODUCED.search(words)
    if is_operand or (words and is_item):
        return None, before
    return ("-" if (sign == "-") != (apart[1] == "-") else ""), left


def _plain(text: str) -> str:
    """A text without LaTeX that only changes how it looks, and without powers of units."""
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("\\%", "%").replace("~", " ")
    text = _FRACTION.sub(r"\\frac", _GROUPED.sub(",", text)).replace("\\,", " ")
    text = _DEGREES.sub(" ", _INVISIBLE.sub("", _STYLED.sub(r"\1", text)))
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    return _UNIT_POWER.sub("", text)


def _as_text(text: str) -> str:
    return _SUBSCRIPT.sub(r"_\1", "".join(_plain(text).split())).rstrip(".").casefold()


def _value(match: re.Match[str]) -> Fraction | None:
    """The size of a match of `_NUMBER`; None for a division by zero, or a number that nobody writes as an answer."""
    if match["above"] is not None:
        size = _divided(_decimal(match["above"]), _decimal(match["below"]))
        whole = Fraction(int(match["whole"] or 0))
        size = None if size is None else whole + size
    elif match["mixed"] is not None:
        part = _divided(Fraction(int(match["top"])), Fraction(int(match["bottom"])))
        size = None if part is None else int(match["mixed"]) + part
    else:
        size = _decimal(match["value"])
        if match["divisor"] is not None:
            size = _divided(size, _decimal(match["divisor"]))
        exponent = int(match["power"] or match["exponent"] or 0)
        if size is not None and exponent:
            size = None if abs(exponent) > MAX_EXPONENT else size * Fraction(10) ** exponent
    return size


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    return Fraction(digits.rstrip(".")) if len(digits) <= MAX_DIGITS else None


def _divided(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return None if above is None or not below else above / below
