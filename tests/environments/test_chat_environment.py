"""Environments that chat, and the example of `docs/chat.md`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy, chat_tokenizer, spelled

from stretto.chat.templates import with_template
from stretto.environments.chat_environment import ChatEnvironment
from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.task_options import EnvironmentOptions, FileOptions
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError
from stretto.types import Prompt

TOKENIZER = chat_tokenizer("hermes")
PAGE = Path(__file__).parents[2] / "docs" / "chat.md"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 3"}}\n</tool_call>'


class Echo(ChatEnvironment):
    """Asks once and returns the length of what it was given."""

    async def play(self, row: dict[str, Any], chat: Any) -> float:
        answer = await chat.chat(row["messages"])
        row["messages"].append(answer.message)
        return float(len(row["messages"]) + row["bonus"])


class Untyped(ChatEnvironment):
    tools = (lambda value: value,)


def prompt_of(text: str, **row: Any) -> Prompt:
    return Prompt(0, text, tuple(TOKENIZER.encode(text)), row)


def test_the_messages_of_a_row_are_its_own_list_in_every_episode() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    prompt = prompt_of("rendered", messages=messages, bonus=10)
    policy = ScriptedPolicy(TOKENIZER, "one")
    assert asyncio.run(Echo(TOKENIZER).episode(prompt, policy)) == 13.0
    assert asyncio.run(Echo(TOKENIZER).episode(prompt, ScriptedPolicy(TOKENIZER, "one"))) == 13.0
    assert "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello" in spelled(TOKENIZER, policy.rows[0])[0][1]


def test_a_prompt_of_text_is_one_message_of_the_user_and_options_reach_the_template() -> None:
    made = Echo(with_template(TOKENIZER, variables={"enable_thinking": False}))
    policy = ScriptedPolicy(TOKENIZER, "one")
    assert asyncio.run(made.episode(prompt_of("hi", bonus=0), policy)) == 2.0
    context = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert spelled(TOKENIZER, policy.rows[0]) == [(False, context), (True, "one<|im_end|>")]


def test_options_of_the_template_in_the_table_config_are_refused_by_the_key_that_takes_them() -> None:
    spec = EnvironmentSpec(f"{__name__}:Echo", 2, {"template_options": {"enable_thinking": False}}, given=Echo)
    with pytest.raises(RecipeError, match=r"`task\.config\.template_options` is no option of .* into `task\.template`"):
        load_environment(spec, TOKENIZER)


def test_a_tool_that_cannot_be_offered_and_a_class_without_play_are_errors_that_say_so() -> None:
    with pytest.raises(RecipeError, match="tool"):
        Untyped(TOKENIZER)
    with pytest.raises(NotImplementedError, match="async def play"):
        asyncio.run(ChatEnvironment(TOKENIZER).episode(prompt_of("hi"), ScriptedPolicy(TOKENIZER)))


def test_an_environment_and_a_reward_get_the_messages_of_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "answer": 1}) + "\n" + json.dumps({"prompt": "x", "answer": 2}))
    asked = {"type": "environment", "path": str(path), "environment": "m:C", "turns": 2, "system": "s"}
    rows = load_task(EnvironmentOptions.model_validate(asked), num_evaluation=0).train
    system = {"role": "system", "content": "s"}
    assert [row.columns for row in rows] == [
        {"answer": 1, "messages": [system, *messages]},
        {"answer": 2, "messages": [system, {"role": "user", "content": "x"}]},
    ]
    scored = {"type": "file", "path": str(path), "reward": "m:f"}
    assert [row.columns for row in load_task(FileOptions.model_validate(scored), num_evaluation=0).train] == [
        {"answer": 1, "messages": messages},
        {"answer": 2},
    ]


def test_the_example_of_the_page_plays_an_episode_and_has_twenty_lines() -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    assert len(example.strip().splitlines()) <= 20
    scope: dict[str, Any] = {"__name__": "example"}
    exec(example, scope)
    environment = load_environment_class(scope)(TOKENIZER)
    row = {"messages": [{"role": "user", "content": "17 boxes of 3?"}], "answer": "51"}
    for answer, reward in (("The answer is 51.", 1.0), ("The answer is 50.", 0.0)):
        policy = ScriptedPolicy(TOKENIZER, CALL, answer)
        assert asyncio.run(environment.episode(prompt_of("rendered", **row), policy)) == reward
        assert policy.lineages == [0, 0]
        assert "<tool_response>\n51\n</tool_response>" in TOKENIZER.decode(policy.rows[0][0])


def load_environment_class(scope: dict[str, Any]) -> Any:
    kinds = [value for value in scope.values() if isinstance(value, type) and issubclass(value, ChatEnvironment)]
    return next(kind for kind in kinds if kind is not ChatEnvironment)
