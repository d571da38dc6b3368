"""Reads the tool calls in what a model wrote.

| form | written by |
|---|---|
| `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Hermes, Qwen 2.5, Qwen 3 |
| `<|python_tag|>{"name": ..., "parameters": {...}}`, several divided by `;` | Llama 3 |
| the whole text is such a JSON object, or a list of them, perhaps in a code fence | Llama 3, others |

A call that cannot be read is never an exception: its text is kept, with an error that the model may be told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.chat.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_JSON = json.JSONDecoder(strict=False)  # models write line breaks inside of strings
_BETWEEN = re.compile(r"[\s;,]*")
_NAME = re.compile(r'"name"\s{0,9}:\s{0,9}"([\w.:/-]{1,128})"')


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The calls in a text, without ids, and the text that is left without them."""

    content: str
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str) -> ParsedCalls:
    """Returns the tool calls of an answer. A call whose name cannot be read is also left in the content."""
    if OPEN in text:
        return _tagged(text)
    before, tag, after = text.partition(PYTHON_TAG)
    if tag:
        calls = _untagged(after) or (_unreadable(after, "it is no JSON object with a `name`"),)
        kept = before if all(call.name for call in calls) else text
        return ParsedCalls(kept.strip(), calls)
    calls = _untagged(text)
    return ParsedCalls("", calls) if calls else ParsedCalls(text, ())


def _tagged(text: str) -> ParsedCalls:
    content, calls = [], []
    start = text.find(OPEN)
    content.append(text[:start])
    close = 0
    while start >= 0:
        body = start + len(OPEN)
        following = text.find(OPEN, body)
        if 0 <= close < body:
            close = text.find(CLOSE, body)
        last = following if following >= 0 else len(text)
        end = close if 0 <= close < last else last
        rest = end + len(CLOSE) if end == close else end
        call = _read(text[body:end])
        calls.append(call)
        content.append(text[rest:last] if call.name else text[start:last])
        start = following
    return ParsedCalls("".join(content).strip(), tuple(calls))


def _untagged(text: str) -> tuple[ToolCall, ...]:
    """Returns the calls that a text consists of; empty if it has anything else in it."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) > 6:
        text = text[3:-3].removeprefix("json").strip()
    if not text.startswith(("{", "[")):
        return ()
    values: list[Any] = []
    place = 0
    while place < len(text):
        try:
            value, place = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError):
            return ()
        values += value if isinstance(value, list) else [value]
        match = _BETWEEN.match(text, place)
        place = match.end() if match else place
    return tuple(map(_from_value, values)) if values and all(map(_is_call, values)) else ()


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("name"), str)
        and bool(value["name"])
        and not value.keys().isdisjoint(("arguments", "parameters"))
    )


def _read(body: str) -> ToolCall:
    body = body.strip()
    try:
        value = _JSON.decode(body)
    except (ValueError, RecursionError) as error:
        return _unreadable(
            body, f"it is no JSON: {error}" if isinstance(error, ValueError) else "it is nested too deep"
        )
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall("", "", body, "it is no JSON object with a `name`")
    return _from_value(value)


def _from_value(value: Mapping[str, Any]) -> ToolCall:
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            decoded = _JSON.decode(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall("", name, arguments, f"its arguments are no JSON: {error}")
        arguments = decoded if isinstance(decoded, dict) else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall("", name, text, "its arguments are no JSON object")
    return ToolCall("", name, arguments)


def _unreadable(body: str, error: str) -> ToolCall:
    found = _NAME.search(body)
    return ToolCall("", found[1] if found else "", body, error)
