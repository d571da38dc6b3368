"""The loop of tool calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_cases import ScriptedPolicy, chat_tokenizer

from stretto.chat.policy import NO_CALLS_LEFT, ChatPolicy
from stretto.chat.rendering import Renderer
from stretto.errors import RoomError

TOKENIZER = chat_tokenizer("hermes")


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def calling(*numbers: int | str) -> str:
    calls = [
        f'<tool_call>\n{{"name": "double", "arguments": {{"number": {number}}}}}\n</tool_call>' for number in numbers
    ]
    return "\n".join(calls)


def play(*script: Any, max_calls: int = 8, stop: bool = True) -> tuple[str, list[str], list[int]]:
    policy = ScriptedPolicy(TOKENIZER, *script, stop=stop)
    chat = ChatPolicy(policy, Renderer(TOKENIZER))
    messages: list[Any] = [{"role": "user", "content": "go"}]
    answer = asyncio.run(chat.run_tools(messages, [double], max_calls=max_calls))
    assert messages[-1] == answer.message or messages[-1]["role"] == "tool"
    return answer.content, [m["content"] for m in messages if m["role"] == "tool"], policy.lineages


def test_tools_are_called_until_an_answer_has_no_call() -> None:
    assert play("at once") == ("at once", [], [0])
    assert play(calling(3), calling(6, 7), "14") == ("14", ["6", "12", "14"], [0, 0, 0])


def test_a_call_that_cannot_be_made_is_told_to_the_model() -> None:
    script = (
        "<tool_call>double 3</tool_call>",
        '<tool_call>{"name": "halve"}</tool_call>',
        calling("true and"),
        "sorry",
    )
    content, results, lineages = play(*script)
    assert (content, lineages) == ("sorry", [0, 0, 0, 0])
    assert "cannot be read: it is no JSON" in results[0]
    assert "there is no tool `halve`; there are: double" in results[1]
    assert "cannot be read: it is no JSON" in results[2]


def test_calls_are_bounded_and_there_is_one_more_turn() -> None:
    assert play(calling(1), calling(2, 3, 4), calling(5), max_calls=2) == (
        "",
        ["2", "4", NO_CALLS_LEFT, NO_CALLS_LEFT],
        [0] * 3,
    )
    assert play(calling(1), "x", max_calls=1) == ("x", ["2"], [0, 0])
    assert play(calling(1), max_calls=0) == ("", [], [0])


def test_the_loop_ends_with_the_tokens() -> None:
    assert play(calling(1), RoomError("no room")) == ("", ["2"], [0])
    assert play(calling(1), stop=False) == ("", [], [0]), "an answer that was cut calls nothing"
    with pytest.raises(RoomError):
        play(RoomError("no room"))
