"""Takes an answer apart: the thinking that it begins with, its content and its tool calls."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stretto.chat.messages import AssistantMessage
from stretto.chat.tool_calls import OPEN, ParsedCalls, parse_tool_calls

THINK, END_OF_THINK = "<think>", "</think>"
PREFILL = re.compile(rf"{THINK}\s*({END_OF_THINK}\s*)?\Z")
"""The end of a prompt in which the chat template has begun the thinking, or has begun and ended it."""


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Returns the thinking that an answer begins with, and what follows it. Thinking that was cut has nothing after."""
    begun = text.lstrip()
    if not begun.startswith(THINK):
        return None, text
    reasoning, _, content = begun.removeprefix(THINK).partition(END_OF_THINK)
    return reasoning.strip() or None, content.lstrip("\n")


def read_answer(prompt: str, text: str, *, has_tools: bool) -> dict[str, Any]:
    """Returns an answer as an assistant message in the shape of the OpenAI API.

    `content` is the text without thinking and tool calls, `reasoning_content` the thinking or None, and `tool_calls` a
    list that may be empty. Calls in `<tool_call>` tags are read in any case, the other forms if the prompt has tools.
    """
    begun = PREFILL.search(prompt)
    reasoning, content = split_reasoning(text if begun is None else begun[0] + text)
    parsed = parse_tool_calls(content) if has_tools or OPEN in content else ParsedCalls(content, ())
    calls = tuple(replace(call, id=f"call{number:05d}") for number, call in enumerate(parsed.calls))
    made = AssistantMessage(parsed.content, reasoning, calls, (), "stop").message
    return {"reasoning_content": None, "tool_calls": [], **made}
