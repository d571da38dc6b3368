"""Tools of a real MCP server, which runs as a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy
from run_cases import rows
from transformers import AutoTokenizer
from world_cases import TOKENIZER, chat_prompt, trained_in_worlds

from stretto.environments.adapters.mcp_tools import McpEnvironment
from stretto.errors import RecipeError, RewardError

pytest.importorskip("mcp")

SERVER = '''
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
calls = 0


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Counts its calls."""
    global calls
    calls += 1
    return f"call {calls}"


@server.tool()
def refuse() -> str:
    """Never works."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """Ends the server."""
    print("the end is near", file=sys.stderr, flush=True)
    os._exit(3)


server.run()
'''


class Sums(McpEnvironment):
    async def play(self, row: dict[str, Any], chat: Any) -> float:
        answer = await chat.run_tools(row["messages"], self.tools, max_calls=8)
        return float(row["answer"] in answer.content)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def shared(command: list[str]) -> Iterator[Sums]:
    made = Sums(TOKENIZER, command=command)
    yield made
    asyncio.run(made.close())


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(made: Sums, *script: str) -> tuple[float, str]:
    policy = ScriptedPolicy(TOKENIZER, *script)
    reward = asyncio.run(made.episode(chat_prompt("How much?", answer="42"), policy))
    return float(reward), TOKENIZER.decode(policy.rows[0][0])


def test_the_model_is_offered_the_servers_tools_and_calls_them(shared: Sums) -> None:
    reward, text = played(shared, said("add", a=40, b=2), "It is 42.")
    assert reward == 1.0
    assert "<tool_response>\n42\n</tool_response>" in text
    assert '"name": "add"' in text
    assert "Adds two numbers." in text
    assert [tool.name for tool in shared.tools] == ["add", "count", "refuse", "die"]


def test_errors_of_the_model_and_of_a_tool_are_text(shared: Sums) -> None:
    _, text = played(shared, said("add", a="x"), said("add"), said("refuse"), "no idea")
    assert "Error: wrong arguments of `add`: `a`: 'x' is not of type 'integer'" in text
    assert "Error: wrong arguments of `add`: 'a' is a required property" in text
    assert "<tool_response>\nError: Error executing tool refuse\n" in text


def test_a_server_that_ends_fails_the_episode_and_is_started_again(shared: Sums) -> None:
    with pytest.raises(RewardError, match=r"has ended .*the end is near"):
        played(shared, said("die"), "42")
    assert "<tool_response>\ncall 1\n" in played(shared, said("count"), "42")[1]


def test_episodes_share_a_server_or_have_one_each(shared: Sums, command: list[str]) -> None:
    first = played(shared, said("count"), "42")[1]
    assert first != played(shared, said("count"), "42")[1]
    apart = Sums(TOKENIZER, command=command, per_episode=True, only=["count"])
    assert [tool.name for tool in apart.tools] == ["count"]
    assert "<tool_response>\ncall 2\n" in played(apart, said("count"), said("count"), "42")[1]
    assert "call 1" in played(apart, said("count"), "42")[1]


def test_a_server_that_does_not_start_is_refused_before_the_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"does not start: .*No such file"):
        Sums(TOKENIZER, command=["no-such-program"])
    (tmp_path / "broken.py").write_text("raise SystemExit('no port left')")
    with pytest.raises(RecipeError, match=r"does not start: .*no port left"):
        Sums(TOKENIZER, command=[sys.executable, str(tmp_path / "broken.py")])
    with pytest.raises(RecipeError, match="write a list"):
        Sums(TOKENIZER, command="python server.py")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="`subtract`, and the server's tools are"):
        Sums(TOKENIZER, command=command, only=["subtract"])
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(RecipeError, match=r"pip install 'stretto\[mcp\]'"):
        Sums(TOKENIZER, command=command)


def test_a_run_trains_with_the_tools_of_a_server_and_verifies(
    command: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model calls nothing: the environment calls a tool for it, and the model reads the result."""
    code = """
        from stretto.environments.adapters.mcp_tools import McpEnvironment

        class Counts(McpEnvironment):
            async def play(self, row, chat):
                found = await self.tools[0].call({"a": 40, "b": 2})
                answer = await chat.chat([*row["messages"], {"role": "user", "content": found}])
                return float(len(answer.content) % 2) + (found == "42")
    """
    (tmp_path / "counts.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{"messages": [{"role": "user", "content": f"{number} and"}]} for number in range(8)]
    trained_in_worlds(
        tmp_path, tmp_path / "model", data, environment="counts:Counts", turns=2,
        config={"command": command, "only": ["add"]},
    )  # fmt: skip
    rewards = [reward for (reward,) in rows(tmp_path / "run", "SELECT reward FROM trajectories")]
    assert set(rewards) <= {1.0, 2.0}, "the tool was called in every episode"


def test_python_is_the_one_that_runs_this(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    Sums(TOKENIZER, command=["python", *command[1:]])
