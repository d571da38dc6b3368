"""An answer as a message: thinking, content and tool calls apart."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.chat.answers import read_answer

CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "has_tools", "content", "reasoning", "calls"),
    [
        ("2+2", "4", False, "4", None, []),
        ("2+2", "<think>\nadd\n</think>\n\n4", False, "4", "add", []),
        ("2+2<think>\n", "add\n</think>\n\n4", False, "4", "add", []),
        ("2+2<think>\n\n</think>\n\n", "4", False, "4", None, []),
        ("2+2", "<think>never ends", False, "", "never ends", []),
        ("2+2", TAGGED, False, "", None, [CALL]),
        ("2+2", f"<think>hm</think>so {TAGGED}", True, "so", "hm", [CALL]),
        ("2+2", '{"name": "add", "parameters": {"a": 1}}', True, "", None, [CALL]),
        (
            "2+2",
            '{"name": "add", "parameters": {"a": 1}}',
            False,
            '{"name": "add", "parameters": {"a": 1}}',
            None,
            [],
        ),
    ],
)
def test_an_answer_is_taken_apart(
    prompt: str, text: str, has_tools: bool, content: str, reasoning: str | None, calls: list[dict[str, Any]]
) -> None:
    assert read_answer(prompt, text, has_tools=has_tools) == {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }
