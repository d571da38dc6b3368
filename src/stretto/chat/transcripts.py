"""Tells apart what a recorded lineage consists of: turns, the tools that each turn calls, and what came back.

Works on the journal's tokens alone: the calls are read from the sampled text, as the endpoint read them in the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.chat.messages import ToolCall
from stretto.chat.tool_calls import CLOSE, OPEN, PYTHON_TAG, parse_tool_calls

END_OF_TURN = re.compile(r"\s*(<\|[^|<>]*\|>|</s>)\s*$")
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)  # Hermes, Qwen

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, special ones included."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A tool call in the text of a turn, from character `start` to `end`. `result` is what was observed next."""

    call: ToolCall
    start: int
    end: int
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `start` to `end` of a lineage: a turn with its number, or with `turn` None what was observed."""

    turn: int | None
    start: int
    end: int
    text: str
    calls: tuple[FoundCall, ...] = ()


def divide(tokens: Sequence[int], spans: Sequence[Sequence[int]], numbers: Sequence[int], decode: Decode) -> list[Part]:
    """Divides a lineage. `spans` are the first token and the end of each turn, and `numbers` their numbers."""
    parts: list[Part] = []
    end_before = 0
    for number, (start, end) in zip(numbers, spans, strict=True):
        if start > end_before:
            parts.append(Part(None, end_before, start, decode(tokens[end_before:start])))
        text = decode(tokens[start:end])
        parts.append(Part(number, start, end, text, find_calls(text)))
        end_before = end
    if end_before < len(tokens):
        parts.append(Part(None, end_before, len(tokens), decode(tokens[end_before:])))
    return [
        _with_results(part, parts[place + 1].text) if part.calls and place + 1 < len(parts) else part
        for place, part in enumerate(parts)
    ]


def find_calls(text: str) -> tuple[FoundCall, ...]:
    """Returns the tool calls of a turn, each with its place in the text."""
    kept = END_OF_TURN.sub("", text)
    calls = parse_tool_calls(kept).calls
    if not calls:
        return ()
    if OPEN in kept:  # one call for each tag
        starts = [found.start() for found in re.finditer(re.escape(OPEN), kept)]
        bounds = []
        for place, start in enumerate(starts):
            following = starts[place + 1] if place + 1 < len(starts) else len(kept)
            close = kept.find(CLOSE, start, following)
            bounds.append((start, following if close < 0 else close + len(CLOSE)))
    else:
        start = max(0, kept.find(PYTHON_TAG))
        bounds = [(start, len(kept))] * len(calls)
    return tuple(FoundCall(call, *bound) for call, bound in zip(calls, bounds, strict=False))


def _with_results(part: Part, observed: str) -> Part:
    """Adds what tools returned: a tagged answer for each call, or the whole observation if it has no tags."""
    results = _RESULT.findall(observed)
    if len(results) < len(part.calls):
        results = [observed.strip()] * len(part.calls)
    calls = tuple(
        FoundCall(each.call, each.start, each.end, result) for each, result in zip(part.calls, results, strict=False)
    )
    return Part(part.turn, part.start, part.end, part.text, calls)
