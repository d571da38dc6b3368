"""Whole runs of several turns over the real engine and trainer: killed, stopped, trained again, on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Stops, assert_same_bits_after_a_kill
from ray_cases import small_cluster
from run_cases import assert_verifies, equal, policy, rows, run, small_recipe

from stretto.assembly.check import check
from stretto.cli import main
from stretto.errors import RecipeError
from stretto.recipe.schema import Recipe

MINE = '''
import asyncio

from stretto.environments.protocol import Outcome
from stretto.errors import RoomError


class Letters:
    """Up to three turns; each earns its letters and digits, and is told how many there were."""

    def __init__(self, tokenizer, *, pause_s=0.0):
        self.tokenizer, self.pause_s = tokenizer, pause_s

    async def episode(self, prompt, policy):
        context, rewards = list(prompt.tokens), []
        while len(rewards) < 3:
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
            said = self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            rewards.append(sum(character in "aeiou0123456789" for character in said) / 8)
            await asyncio.sleep(self.pause_s)
            context += turn.tokens.tolist() + self.tokenizer.encode(f"={len(said)}:", add_special_tokens=False)
        return Outcome(tuple(rewards))
'''


def talking(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Six updates of 3 groups of 4 episodes, whose turns end at a vowel."""
    (folder / "our_environments.py").write_text(MINE)
    tables = """
        [task]
        type = "environment"
        path = "prompts.jsonl"
        environment = "our_environments:Letters"
        turns = 3
        [rollout]
        max_tokens = 40
        stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
        [algorithm]
        turns = {}
        [training]
        steps = 6
    """
    return small_recipe(model, folder, tables, *overrides)


def turns_of(folder: Path) -> list[Any]:
    query = "SELECT trajectory, turns, turn_rewards FROM completions JOIN trajectories USING (trajectory) ORDER BY 1"
    return list(rows(folder, query))


def test_a_run_of_several_turns_trains_on_them_and_is_evaluated(model: Path, tmp_path: Path) -> None:
    summary = run(talking(model, tmp_path), tmp_path / "run")
    assert summary["eval_after"] is not None
    assert summary["mismatch_kl"] < 1e-6
    assert_verifies(tmp_path / "run")
    several = [turns for _, turns, _ in turns_of(tmp_path / "run") if turns is not None]
    assert len(several) > 36
    assert all(earned is not None for _, _, earned in turns_of(tmp_path / "run"))
    ((sampled, tokens),) = rows(tmp_path / "run", "SELECT SUM(num_sampled), SUM(num_tokens) FROM completions")
    assert summary["tokens"] == sampled < tokens


def test_a_run_that_is_killed_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    made = talking(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0")
    assert_same_bits_after_a_kill(made, tmp_path, at=3)
    assert turns_of(tmp_path / "run") == turns_of(tmp_path / "whole")


def test_a_run_that_is_stopped_goes_on_with_its_turns_and_loses_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = talking(model, tmp_path, "rollout.in_flight=9", "task.config.pause_s=0.1", "evaluation.prompts=0")
    assert run(made, tmp_path / "run", observer=Stops(at=2))["stopped"]
    assert run(made, tmp_path / "run", resume=True)["trained_trajectories"] == 72
    assert_verifies(tmp_path / "run")
    ((note,),) = rows(tmp_path / "run", "SELECT text FROM notes WHERE kind = 'resumed'")
    assert int(note.split()[0]) > 0, note
    assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    (tmp_path / "as a run").mkdir()
    (tmp_path / "again").rename(tmp_path / "as a run" / "policy")
    assert equal(policy(tmp_path / "as a run"), policy(tmp_path / "run"))
    assert main(["show", str(tmp_path / "run"), "--update", "5"]) == 0
    assert "turns" in capsys.readouterr().out


@pytest.mark.slow
def test_instances_on_a_cluster_play_the_same_episodes(model: Path, tmp_path: Path) -> None:
    made = talking(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0", "training.steps=2")
    run(made, tmp_path / "local")
    ray = ('runtime.type="ray"', "runtime.instances=2", "runtime.instance_cpus=1.0", "runtime.trainer_cpus=1.0")
    with small_cluster():
        here = 'rollout.paradigm="synchronous"', "evaluation.prompts=0", "training.steps=2"
        run(talking(model, tmp_path, *here, *ray), tmp_path / "ray")
    assert_verifies(tmp_path / "ray")
    assert turns_of(tmp_path / "ray") == turns_of(tmp_path / "local")


def test_check_makes_the_environment_and_says_who_plays(model: Path, tmp_path: Path) -> None:
    assert "episodes of up to 3 turns played by `our_environments:Letters`" in str(check(talking(model, tmp_path)))
    with pytest.raises(RecipeError, match=r"`task.config = \{'nothing': 1\}`"):
        check(talking(model, tmp_path, "task.config.nothing=1"))
