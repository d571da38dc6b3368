"""Environments that play their own episodes: the guessing game, and one that a recipe names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.environments.custom import EnvironmentSpec, close_environment, load_environment, start_environment
from stretto.environments.guess import ENVIRONMENT, PROMPT, WASTED, Guess
from stretto.environments.protocol import Outcome
from stretto.environments.task_options import EnvironmentOptions, GuessOptions
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError, RoomError
from stretto.models.tiny import tiny_tokenizer
from stretto.types import Completion, Prompt

TOKENIZER = tiny_tokenizer()


class Says:
    """A policy that says what it was told to say, and keeps what it was asked."""

    left = 99

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def generate(self, tokens: Sequence[int]) -> Completion:
        self.asked.append(TOKENIZER.decode(list(tokens)))
        if not self.answers:
            raise RoomError("full")
        said = TOKENIZER.encode(self.answers.pop(0))
        return Completion(0, 0, np.array(said, np.int32), np.zeros(len(said), np.float32), "stop", "")


def play(numbers: list[int], *answers: str) -> tuple[tuple[float, ...], list[str]]:
    policy = Says(*answers)
    prompt = Prompt(0, PROMPT, tuple(TOKENIZER.encode(PROMPT)), {"numbers": numbers})
    outcome = asyncio.run(Guess(TOKENIZER).episode(prompt, policy))
    assert isinstance(outcome, Outcome)
    return outcome.turns, policy.asked


def test_the_game_answers_each_guess_and_goes_on_with_the_next_number() -> None:
    rewards, asked = play([5, 2, 7, 7], "4", "a6", "5", "2")
    assert rewards == (0.0, 0.0, 1.0, 1.0)
    assert asked == ["1-7?", "1-7?4>", "1-7?4>a6<", "1-7?4>a6<5!"]
    assert play([5, 4, 3], "5", "5", "4")[0] == (1.0, 0.0, 1.0), "nothing is ruled out of the next one"


def test_a_guess_that_was_ruled_out_and_one_of_nothing_are_wasted() -> None:
    rewards, asked = play([5, 1, 1], "4", "3", "x")
    assert rewards == (0.0, WASTED, WASTED)
    assert asked[-1] == "1-7?4>3>"
    assert play([5, 1, 1], "9", "x", "8")[0] == (WASTED, WASTED, WASTED)


def test_the_game_ends_when_there_is_no_room_or_no_turn_left() -> None:
    assert play([5, 1, 1], "4")[0] == (0.0,)
    assert play([5, 1], "1", "2", "3", "4")[0] == (0.0, 0.0)


def test_the_task_of_the_game_draws_every_number_and_says_none_in_its_prompt() -> None:
    task = load_task(GuessOptions(size=200, turns=4), num_evaluation=100)
    for rows in (task.train, task.evaluation):
        assert {number for row in rows for number in row.columns["numbers"]} == set(range(1, 8))
        assert {len(row.columns["numbers"]) for row in rows} == {4}
    assert task.train[0] != task.evaluation[0]
    assert {row.text for row in task.train} == {PROMPT}
    assert (task.max_turns, task.reward) == (4, None)
    assert task.environment is not None
    assert isinstance(load_environment(task.environment, TOKENIZER), Guess)


# -- of your own -------------------------------------------------------------------------------------------------------

MINE = """
class Mine:
    def __init__(self, tokenizer, *, depth=1):
        if depth > 9:
            raise ValueError("too deep")
        self.tokenizer, self.depth = tokenizer, depth
    async def episode(self, prompt, policy):
        return 0.0

class Plain:
    def __init__(self, tokenizer):
        pass
    def episode(self, prompt, policy):
        return 0.0

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_environments.py").write_text(MINE)
    (tmp_path / "unparsed.py").write_text("import json\nclass Mine(:\n")
    (tmp_path / "program.py").write_text("import sys\nsys.exit(4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_class_of_the_working_directory_is_made_with_the_tokenizer_and_its_options(here: Path) -> None:
    made: Any = load_environment(EnvironmentSpec("my_environments:Mine", 2, {"depth": 3}), TOKENIZER)
    assert (made.tokenizer, made.depth) == (TOKENIZER, 3)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("my_environments", {}, r"is not a class: write it as `package\.module:Class`"),
        ("no_such_module:Mine", {}, "there is no module `no_such_module`"),
        ("my_environments:Min", {}, "has no `Min`; did you mean `Mine`"),
        ("my_environments:number", {}, "is 3, which cannot be called"),
        (
            "my_environments:Mine",
            {"width": 2},
            r"`task\.config = \{'width': 2\}`.*defined as `Mine\(tokenizer, \*, depth",
        ),
        ("my_environments:Mine", {"depth": 10}, "could not be created: ValueError: too deep"),
        ("unparsed:Mine", {}, r"importing `unparsed` failed: SyntaxError: invalid syntax \(unparsed\.py:2\)"),
        ("program:Mine", {}, r"importing `program` failed: SystemExit: 4 \(program\.py:2\)"),
        ("my_environments:Plain", {}, r"has no episodes: define `async def episode\(self, prompt, policy\)`"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(here: Path, name: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=f"`task.environment = '{name}'`.*{said}|{said}"):
        load_environment(EnvironmentSpec(name, 2, config), TOKENIZER)


def test_the_rows_of_an_environment_of_your_own_are_those_of_its_file(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "a", "n": 1}\n' * 10)
    options = EnvironmentOptions(path=str(here / "rows.jsonl"), environment="my_environments:Mine", turns=2)
    task = load_task(options, num_evaluation=2)
    assert (len(task.train), len(task.evaluation), task.max_turns, task.reward) == (8, 2, 2, None)
    assert ENVIRONMENT != "my_environments:Mine"


def test_the_example_asks_again_after_a_wrong_answer() -> None:
    policy = Says("Lyon", "paris")
    prompt = Prompt(0, "France: ", tuple(TOKENIZER.encode("France: ")), {"answer": "Paris"})
    spec = EnvironmentSpec("examples.environment:SecondChance", 3, {"hint": "No: "})
    outcome = asyncio.run(load_environment(spec, TOKENIZER).episode(prompt, policy))
    assert outcome == Outcome((0.0, 1.0))
    assert policy.asked == ["France: ", "France: Lyon\nNo: "]


class WithEnds(Guess):
    """Has a start and an end."""

    def __init__(self, tokenizer: Any) -> None:
        self.seen: list[str] = []

    async def start(self) -> None:
        self.seen.append("start")

    async def close(self) -> None:
        self.seen.append("close")


def test_an_environment_may_have_a_start_and_an_end() -> None:
    async def run() -> None:
        both = WithEnds(TOKENIZER)
        for environment in (both, Guess(TOKENIZER)):
            await start_environment(environment)
            await close_environment(environment)
        assert both.seen == ["start", "close"]

    asyncio.run(run())
