"""Games of textarena: for one player, for two, and what cannot be played offline."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_cases import ScriptedPolicy
from world_cases import TOKENIZER, chat_prompt, play, trained_in_worlds

from stretto.environments.adapters.textarena import TextArenaEnvironment, random_move
from stretto.environments.protocol import Outcome
from stretto.errors import RecipeError, RewardError

pytest.importorskip("textarena")


def guessed(*numbers: str, seed: int = 4) -> Any:
    made = TextArenaEnvironment(TOKENIZER, id="GuessTheNumber-v0", turns=10)
    return play(made, chat_prompt("Play.", seed=seed), *numbers)


def target(seed: int) -> int:
    """The number of a game, as the game tells it at the end of its turns."""
    low, high = 1, 20
    for _ in range(6):
        middle = (low + high) // 2
        outcome, row = guessed(f"[{middle}]", seed=seed) if low == high else guessed(f"[{middle}]", "x", seed=seed)
        if outcome.turns[-1] == 1.0:
            return middle
        low, high = (low, middle - 1) if "is lower" in row[2][1] else (middle + 1, high)
    raise AssertionError("not found")


def test_a_game_for_one_player_is_played_to_its_end() -> None:
    number = target(4)
    wrong = number - 1 if number > 1 else 2
    outcome, row = guessed(f"[{wrong}]", f"It is [{number}]", seed=4)
    assert outcome == Outcome((0.0, 1.0))
    assert row[0][1].startswith("<|im_start|>user\nPlay.\n\nYou are Player 0. You are playing Guess The Number.")
    hint = "higher" if wrong < number else "lower"
    assert row[2] == (False, f"\n<|im_start|>user\nThe target number is {hint}.<|im_end|>\n<|im_start|>assistant\n")


def test_the_seed_of_a_row_decides_the_game() -> None:
    assert len({target(seed) for seed in range(5)}) > 1
    assert target(3) == target(3)


def test_a_random_opponent_moves_the_same_way_when_an_episode_is_run_again() -> None:
    made = TextArenaEnvironment(TOKENIZER, id="TicTacToe-v0", turns=9, opponent="random")
    script = ["[4]", "[0]", "[8]", "[2]", "[6]", "[1]", "[3]", "[5]", "[7]"]
    first = play(made, chat_prompt("Play.", seed=1), *script)
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert play(made, chat_prompt("Play.", seed=1), *script) == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert first[0].turns[-1] in (-1.0, 0.0, 1.0)
    others = [play(made, chat_prompt("Play.", seed=seed), *script)[1] for seed in range(2, 6)]
    assert any(row != first[1] for row in others)
    assert "[Player 1]" in first[1][2][1]


def test_games_at_once_do_not_disturb_each_other() -> None:
    made = TextArenaEnvironment(TOKENIZER, id="TicTacToe-v0", turns=9, opponent="random")
    script = ["[4]", "[0]", "[8]", "[2]", "[6]", "[1]", "[3]", "[5]", "[7]"]

    async def episode(seed: int) -> tuple[Any, list[int]]:
        policy = ScriptedPolicy(TOKENIZER, *script)
        outcome = await made.episode(chat_prompt("Play.", seed=seed), policy)
        return outcome, policy.rows[0][0]

    async def at_once() -> list[Any]:
        return list(await asyncio.gather(*map(episode, range(6))))

    async def one_by_one() -> list[Any]:
        return [await episode(seed) for seed in range(6)]

    assert asyncio.run(at_once()) == asyncio.run(one_by_one())


def test_an_opponent_of_the_user_may_have_the_first_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        def lowest(observation):
            seen.append(observation)
            return observation.rpartition("Available Moves: ")[2].split(",")[0].strip("'")

        seen = []
    """
    (tmp_path / "opponents.py").write_text(re.sub(r"^ {8}", "", code, flags=re.MULTILINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = TextArenaEnvironment(TOKENIZER, id="TicTacToe-v0", turns=5, opponent="opponents:lowest", player=1)
    outcome, row = play(made, chat_prompt("Play."), "[8]", "[7]", "[6]")
    assert outcome == Outcome((0.0, -1.0))  # 0, 1 and 2 are the opponent's
    assert "[Player 0] [0]" in row[0][1]
    assert "you will be 'X'" in row[0][1]
    other_side = play(made, chat_prompt("Play.", player=0), "[3]", "[4]", "[5]")
    assert other_side[0] == Outcome((0.0, 0.0, 1.0))


def test_games_that_cannot_be_played_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, **config: Any) -> None:
        with pytest.raises(RecipeError, match=match):
            TextArenaEnvironment(TOKENIZER, turns=3, **config)

    refused("no game of textarena", id="NoSuchGame-v0")
    refused("if it is a game for two, set `task.config.opponent`", id="TicTacToe-v0")
    refused("cannot be played here", id="Debate-v0", opponent="random")
    refused("numbered from 0", id="GuessTheNumber-v0", player=1)
    refused("no_such_module", id="TicTacToe-v0", opponent="no_such_module:f")
    monkeypatch.setitem(sys.modules, "textarena", None)
    refused(r"pip install 'stretto\[textarena\]'", id="GuessTheNumber-v0")


def test_a_random_opponent_needs_a_list_of_moves() -> None:
    assert random_move("Valid moves: [a1]\nlater\nAvailable Moves: '[b2]'") == "[b2]"
    with pytest.raises(RewardError, match="does not list them"):
        random_move("Your move?")


def test_a_run_trains_in_a_game_and_verifies(model: Path, tmp_path: Path) -> None:
    earned = trained_in_worlds(
        tmp_path, model, [{"prompt": "Play.", "seed": seed} for seed in range(8)], max_tokens=1_200,
        environment="stretto.environments.adapters.textarena:TextArenaEnvironment", turns=2,
        config={"id": "TicTacToe-v0", "opponent": "random"},
    )  # fmt: skip
    assert any(rewards is not None for rewards in earned)
