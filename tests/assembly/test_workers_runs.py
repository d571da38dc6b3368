"""Whole runs whose episodes are played by worker processes: killed, limited, and the same as in the driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import assert_verifies, rows, run, small_recipe, story

from stretto.assembly.check import check
from stretto.recipe.schema import Recipe

MINE = '''
import asyncio
import os
import subprocess

from stretto.environments.protocol import Outcome
from stretto.errors import BudgetError, RoomError


class Letters:
    """Up to three turns; each earns its letters and digits. It may spend, wait, and once have its process killed."""

    def __init__(self, tokenizer, *, pids=None, killed=None, spends=0.0, waits=None):
        self.tokenizer, self.killed, self.spends, self.waits = tokenizer, killed, spends, waits
        if pids is not None:
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\\n")

    async def episode(self, prompt, policy):
        print("begun")
        context, rewards = list(prompt.tokens), []
        while len(rewards) < 3:
            try:
                policy.spend(self.spends, "a call")
                turn = await policy.generate(context)
            except (RoomError, BudgetError):
                break
            said = self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            rewards.append(sum(character in "aeiou0123456789" for character in said) / 8)
            policy.report(Outcome(tuple(rewards)))
            if self.killed is not None and not os.path.exists(self.killed):
                with open(self.killed, "w"):
                    subprocess.Popen(["kill", "-9", str(os.getpid())], start_new_session=True)
                await asyncio.sleep(3600)
            if self.waits is not None and prompt.row["answer"] % 3 == 0:
                await asyncio.sleep(self.waits)
            context += turn.tokens.tolist() + self.tokenizer.encode(f"={len(said)}:", add_special_tokens=False)
        return Outcome(tuple(rewards))
'''


def talking(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Three updates of 3 groups of 4 episodes, whose turns end at a vowel."""
    (folder / "worker_environments.py").write_text(MINE)
    tables = """
        [task]
        type = "environment"
        path = "prompts.jsonl"
        environment = "worker_environments:Letters"
        turns = 4
        [rollout]
        max_tokens = 40
        stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
        [evaluation]
        prompts = 0
    """
    return small_recipe(model, folder, tables, *overrides)


def limits_of(folder: Path) -> dict[str | None, int]:
    return dict(rows(folder, "SELECT limit_reached, COUNT(*) FROM trajectories GROUP BY 1"))


def test_worker_processes_play_the_episodes_of_the_driver(model: Path, tmp_path: Path) -> None:
    same = 'rollout.paradigm="synchronous"', "training.steps=2"
    run(talking(model, tmp_path, *same, "task.workers=0"), tmp_path / "driver")
    summary = run(talking(model, tmp_path, *same, "task.workers=2"), tmp_path / "workers")
    assert_verifies(tmp_path / "workers")
    assert story(tmp_path / "workers") == story(tmp_path / "driver")
    assert (summary["generation_retries"], summary["scoring_retries"]) == (0, 0)
    assert (tmp_path / "workers" / "reward.log").read_text().split() == ["begun"] * 24


def test_a_worker_that_is_killed_costs_a_retry_and_no_trajectory_and_the_run_verifies(
    model: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    killer = f'task.config.pids="{pids}"', f'task.config.killed="{tmp_path / "killed"}"'
    summary = run(talking(model, tmp_path, *killer, "task.workers=1"), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert len(pids.read_text().split()) == 2, "another worker took its place"
    assert summary["failed_trajectories"] == 0
    assert summary["trained_trajectories"] == 36
    assert summary["generation_retries"] + summary["scoring_retries"] > 0
    reasons = rows(tmp_path / "run", "SELECT DISTINCT reason FROM failures")
    assert reasons
    assert all("was ended by SIGKILL" in reason for (reason,) in reasons), reasons


def test_the_limits_that_episodes_reach_are_in_the_journal_and_in_the_metrics(model: Path, tmp_path: Path) -> None:
    made = talking(
        model, tmp_path, "task.config.spends=0.4", "task.budget=0.9", "task.workers=1", "training.steps=1"
    )  # fmt: skip
    summary = run(made, tmp_path / "spent")
    assert_verifies(tmp_path / "spent")
    found = limits_of(tmp_path / "spent")
    assert found["budget"] > 0
    assert found["budget"] == summary["limits_reached"]["budget"]
    ((spent,),) = rows(tmp_path / "spent", "SELECT SUM(spent) FROM trajectories")
    assert summary["spent"] == pytest.approx(spent)
    assert spent > 0

    made = talking(
        model, tmp_path, "task.config.waits=60.0", "task.episode_seconds=2.0", "task.workers=1", "training.steps=1"
    )
    summary = run(made, tmp_path / "cut")
    assert_verifies(tmp_path / "cut")
    assert summary["limits_reached"]["seconds"] > 0
    cut = rows(
        tmp_path / "cut",
        "SELECT t.reward, c.turns FROM trajectories t JOIN completions c USING (trajectory) "
        "WHERE limit_reached = 'seconds'",
    )
    assert cut
    assert all(reward is not None for reward, _ in cut)
    assert all(turns is None for _, turns in cut), "one turn each, before the world made it wait"


def test_check_starts_one_worker_and_says_what_it_found(model: Path, tmp_path: Path) -> None:
    said = str(check(talking(model, tmp_path, "task.workers=2")))
    assert "played by `worker_environments:Letters` in 2 worker processes (one starts in " in said
    assert "in the driver's process" in str(check(talking(model, tmp_path, "task.workers=0")))
