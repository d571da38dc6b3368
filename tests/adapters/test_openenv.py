"""Episodes on a real OpenEnv server, which runs as a process of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy
from world_cases import TOKENIZER, chat_prompt, play, trained_in_worlds

from stretto.environments.adapters.openenv import OpenEnvEnvironment
from stretto.environments.protocol import Outcome
from stretto.errors import RecipeError, RewardError

pytest.importorskip("openenv")

SERVER = '''
import os
import random
import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Numbers(Environment):
    """Guess a number from 1 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self, seed=None, episode_id=None, number=None, **options):
        self.number = number if number is not None else random.Random(seed).randint(1, 9)
        return Hint(hint="Guess.", done=False, reward=None)

    def step(self, action, **options):
        if action.text == "die":
            os._exit(3)
        guess = int(action.text) if action.text.isdigit() else 0
        if guess == self.number:
            return Hint(hint="Right!", done=True, reward=1.0)
        return Hint(hint="higher" if guess < self.number else "lower", done=False, reward=-0.1)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=2)
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
'''

FUNCTIONS = """
def act(text):
    if not text.isdigit():
        raise ValueError("a number, please")
    return {"text": text}


def observe(observation):
    return observation["hint"].upper()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = subprocess.Popen([sys.executable, str(path), str(listening.fileno())], pass_fds=[listening.fileno()])
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(f"{address}/health", timeout=180).close()  # answered when it has started
        yield address
    finally:
        made.kill()
        made.wait()


def made(url: str, **config: Any) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(TOKENIZER, **{"url": url, "turns": 5, "action": "text", "observation": "hint", **config})


def test_an_episode_is_played_on_the_server(url: str) -> None:
    outcome, row = play(made(url), chat_prompt("A number from 1 to 9.", reset={"number": 7}), "3", "9", "7")
    assert outcome == Outcome((-0.1, -0.1, 1.0))
    assert "A number from 1 to 9.\n\nGuess.<|im_end|>" in row[0][1]
    assert "user\nhigher<|im_end|>" in row[2][1]
    assert "user\nlower<|im_end|>" in row[4][1]


def test_the_seed_of_a_row_decides_the_episode(url: str) -> None:
    script = [str(number) for number in range(1, 6)]
    rows = [play(made(url), chat_prompt("?", seed=seed), *script) for seed in (1, 1, 2, 3, 4, 5)]
    assert rows[0] == rows[1]
    assert any(row != rows[0] for row in rows)


def test_more_episodes_than_sessions_wait_for_their_turn(url: str) -> None:
    environment = made(url, sessions=2)

    async def episode(number: int) -> Any:
        return await environment.episode(
            chat_prompt("?", reset={"number": number}), ScriptedPolicy(TOKENIZER, "5", str(number))
        )

    async def at_once() -> list[Any]:
        return list(await asyncio.gather(*map(episode, (1, 2, 3, 4, 6, 7))))

    assert asyncio.run(at_once()) == [Outcome((-0.1, 1.0))] * 6


def test_functions_of_the_user_and_json(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_numbers.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = made(url, action=None, observation=None, act="my_numbers:act", observe="my_numbers:observe")
    outcome, row = play(own, chat_prompt("?", reset={"number": 7}), "seven", "7")
    assert outcome == Outcome((0.0, 1.0))
    assert "GUESS." in row[0][1]
    assert "Error: a number, please" in row[2][1]
    assert '"hint": "Guess."' in play(made(url, observation=None), chat_prompt("?", reset={"number": 7}), "7")[1][0][1]


def test_what_cannot_work_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="and not both"):
        made(url, act="m:f")
    with pytest.raises(RecipeError, match="is no URL"):
        made("localhost")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(RecipeError, match="nobody listens"):
        made(nobody)
    with pytest.raises(RewardError, match="the server's observations have"):
        play(made(url, observation="text"), chat_prompt("?"), "1")
    with pytest.raises(RewardError, match="the OpenEnv server failed: "):
        play(made(url, action="number"), chat_prompt("?"), "1")
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(RecipeError, match=r"pip install 'stretto\[openenv\]'"):
        made(url)


def test_a_run_trains_on_a_server_and_verifies(url: str, model: Path, tmp_path: Path) -> None:
    earned = trained_in_worlds(
        tmp_path, model, [{"prompt": "A number?", "seed": seed} for seed in range(8)], workers=1,
        environment="stretto.environments.adapters.openenv:OpenEnvEnvironment", turns=2,
        config={"url": url, "action": "text", "observation": "hint", "sessions": 2},
    )  # fmt: skip
    assert any(rewards is not None for rewards in earned)


def test_a_server_that_ends_fails_the_episode(url: str) -> None:
    with pytest.raises(RewardError, match="the OpenEnv server failed"):
        play(made(url), chat_prompt("?", reset={"number": 7}), "die", "7")
