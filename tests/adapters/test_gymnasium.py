"""Environments of gymnasium: its own, one of text, and a whole run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy
from world_cases import TOKENIZER, chat_prompt, plain_prompt, play, trained_in_worlds

from stretto.environments.adapters.gymnasium import GymnasiumEnvironment, plain
from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.protocol import Outcome
from stretto.errors import RecipeError, RewardError, RoomError

gymnasium = pytest.importorskip("gymnasium")

LAKE = {"id": "FrozenLake-v1", "options": {"render_mode": "ansi", "is_slippery": False}}
MOVES = ["left", "down", "right", "up"]

MINE = '''
import string
import threading

import gymnasium

everyone = threading.Barrier(40)


class Vowels(gymnasium.Env):
    """Three rounds; each earns the vowels of the action, and tells how many there were."""

    observation_space = gymnasium.spaces.Text(64)
    action_space = gymnasium.spaces.Text(64, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rounds = 0
        return f"begin {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.rounds += 1
        if "Z" * 20 in action:
            raise OSError("the disk is full")
        vowels = sum(letter in "aeiou0123456789" for letter in action)
        return f"{vowels} vowels", vowels / 8, self.rounds == 3, False, {}


gymnasium.register("Vowels-v0", entry_point=Vowels)


def observe(env, observation, info):
    return "You have {}, the dealer shows {}.".format(*observation)


def meet(env, text):
    everyone.wait(timeout=30)
    return text


def act(env, text):
    if text not in ("hit", "stick"):
        raise ValueError("say hit or stick")
    return int(text == "hit")
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_worlds.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_worlds", raising=False)
    gymnasium.registry.pop("Vowels-v0", None)


def test_an_episode_on_the_frozen_lake_reaches_its_end_by_named_actions() -> None:
    made = GymnasiumEnvironment(TOKENIZER, turns=9, actions=MOVES, **LAKE)
    said = ["down", "I go DOWN.", "up? no: right", "nowhere", "down", "right", "right"]
    outcome, row = play(made, chat_prompt("Reach G.", seed=1), *said)
    assert outcome == Outcome((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    first = "<|im_start|>user\nReach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>\n<|im_start|>assistant\n"
    assert row[0] == (False, first)
    assert [text for sampled, text in row if sampled] == [f"{text}<|im_end|>" for text in said]
    assert "Error: name one of these actions: left, down, right, up" in row[8][1]


def test_an_episode_ends_with_its_turns_and_with_its_tokens() -> None:
    made = GymnasiumEnvironment(TOKENIZER, turns=2, actions=MOVES, **LAKE)
    assert play(made, chat_prompt("Go.", seed=1), "left", "left", "left")[0] == Outcome((0.0, 0.0))
    assert play(made, chat_prompt("Go.", seed=1), "left", RoomError("full"))[0] == Outcome((0.0,))
    with pytest.raises(RoomError):
        play(made, chat_prompt("Go.", seed=1), RoomError("full"))


@pytest.mark.usefixtures("mine")
def test_functions_of_the_user_make_text_of_cards() -> None:
    made = GymnasiumEnvironment(TOKENIZER, id="Blackjack-v1", turns=4, observe="my_worlds:observe", act="my_worlds:act")
    outcome, row = play(made, chat_prompt("Play.", seed=3), "hm", "stick")
    again, row_again = play(made, chat_prompt("Play.", seed=3), "hm", "stick")
    assert len(outcome.turns) == 2
    assert outcome.turns[0] == 0.0
    assert outcome.turns[1] in (-1.0, 0.0, 1.0)
    assert "You have" in row[0][1]
    assert "Error: say hit or stick" in row[2][1]
    assert (again, row_again) == (outcome, row)


@pytest.mark.usefixtures("mine")
def test_text_needs_no_function_and_a_prompt_of_plain_text_no_template() -> None:
    made = GymnasiumEnvironment(TOKENIZER, id="my_worlds:Vowels-v0", turns=3)
    outcome, row = play(made, plain_prompt("Say vowels.", seed=7), "aei", "x", "aaaa")
    assert outcome == Outcome((0.375, 0.0, 0.5))
    number = row[0][1].removeprefix("Say vowels.\nbegin ").rstrip("\n")
    assert number.isdigit()
    assert row[1:4] == [(True, "aei<|im_end|>"), (False, "\n3 vowels\n"), (True, "x<|im_end|>")]
    assert play(made, plain_prompt("Say vowels.", seed=8), "a")[1][0] != row[0]


@pytest.mark.usefixtures("mine")
def test_environments_that_wait_do_so_together_whatever_the_number_of_cores() -> None:
    made = GymnasiumEnvironment(TOKENIZER, id="my_worlds:Vowels-v0", turns=1, act="my_worlds:meet")

    async def episodes() -> list[Outcome]:
        prompts = [plain_prompt("Say vowels.", seed=seed) for seed in range(40)]
        return await asyncio.gather(*(made.episode(each, ScriptedPolicy(TOKENIZER, "a")) for each in prompts))

    assert asyncio.run(episodes()) == [Outcome((0.125,))] * 40
    with pytest.raises(RecipeError, match=r"`task.config.threads = 0`"):
        GymnasiumEnvironment(TOKENIZER, id="my_worlds:Vowels-v0", turns=1, threads=0)


@pytest.mark.usefixtures("mine")
def test_an_environment_that_raises_fails_its_episode() -> None:
    made = GymnasiumEnvironment(TOKENIZER, id="my_worlds:Vowels-v0", turns=3)
    with pytest.raises(RewardError, match="OSError: the disk is full"):
        play(made, plain_prompt("Say vowels."), "Z" * 20)


def test_options_that_cannot_be_played_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, **config: Any) -> None:
        with pytest.raises(RecipeError, match=match):
            GymnasiumEnvironment(TOKENIZER, turns=3, **config)

    refused("gymnasium.make", id="NoSuchLake-v1")
    refused("observations of `FrozenLake-v1` are no text", id="FrozenLake-v1", actions=MOVES)
    refused("actions of `FrozenLake-v1` are no text", **LAKE)
    refused("has 2 names, and `FrozenLake-v1` has 4", **LAKE, actions=["left", "right"])
    refused("task.config.act", **LAKE, act="no function")
    refused("no_such_module", **LAKE, act="no_such_module:act")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    refused(r"pip install 'stretto\[gymnasium\]'", **LAKE)


def test_a_recipe_gives_its_turns_to_an_environment_that_asks_for_them() -> None:
    name = "stretto.environments.adapters.gymnasium:GymnasiumEnvironment"
    made = load_environment(EnvironmentSpec(name, 2, {**LAKE, "actions": MOVES}), TOKENIZER)
    assert len(play(made, chat_prompt("Go.", seed=1), "left", "left", "left")[0].turns) == 2


def test_highlighted_text_of_a_terminal_stands_in_brackets() -> None:
    assert plain("  (Left)\n\x1b[41mS\x1b[0mFF\n\x1b[32mH\x1b[0mG\n") == "  (Left)\n[S]FF\nHG"


@pytest.mark.usefixtures("mine")
def test_a_run_trains_in_a_world_of_gymnasium_and_verifies(model: Path, tmp_path: Path) -> None:
    earned = trained_in_worlds(
        tmp_path, model, [{"prompt": "Say vowels.", "seed": seed} for seed in range(8)],
        environment="stretto.environments.adapters.gymnasium:GymnasiumEnvironment", turns=3,
        config={"id": "my_worlds:Vowels-v0"},
    )  # fmt: skip
    assert any(rewards is not None for rewards in earned)
