"""Whole runs of several lineages over the real engine and trainer: killed, stopped, trained again, scored again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruption_cases import Stops, assert_same_bits_after_a_kill
from run_cases import assert_verifies, equal, policy, rows, run, small_recipe

from stretto.cli import main
from stretto.recipe.schema import Recipe

MINE = '''
import asyncio

from stretto.environments.protocol import Outcome
from stretto.errors import RoomError


class Branches:
    """Answers, asks for a title that is not trained, has a sub-agent, and compacts the context when it is full."""

    def __init__(self, tokenizer, *, pause_s=0.0, by_turn=False):
        self.tokenizer, self.pause_s, self.by_turn = tokenizer, pause_s, by_turn

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def episode(self, prompt, policy):
        self_rewards = []

        async def ask(tokens, **how):
            turn = await policy.generate(tokens, **how)
            said = self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            self_rewards.append(sum(character in "aeiou0123456789" for character in said) / 8)
            await asyncio.sleep(self.pause_s)
            return turn.tokens.tolist(), said

        first, said = await ask(prompt.tokens)
        main = [*prompt.tokens, *first]
        await ask(self.encode("t:") + first[:3], lineage=1, train=False)
        agent, opened = self.encode("agent " + said[:4] + ":"), 2
        for _ in range(2):
            try:
                answer, _ = await ask(agent, lineage=2)
            except RoomError:
                break
            opened = 3
            agent += [*answer, *self.encode(";")]
        try:
            await ask(main + self.encode(f"={len(said)}:"))
        except RoomError:
            await ask(self.encode("so far ") + main[-4:], lineage=opened)
        else:
            if len(said) > 12:
                await ask(self.encode("so ") + main[-4:], lineage=opened)
        return Outcome(tuple(self_rewards)) if self.by_turn else sum(self_rewards)
'''


def branching(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Four updates of 3 groups of 4 episodes, whose turns end at a vowel."""
    (folder / "our_branches.py").write_text(MINE)
    tables = """
        [task]
        type = "environment"
        path = "prompts.jsonl"
        environment = "our_branches:Branches"
        turns = 6
        [rollout]
        max_tokens = 24
        stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
        [algorithm]
        average = "sequence"
        [training]
        steps = 4
    """
    return small_recipe(model, folder, tables, *overrides)


def lineages_of(folder: Path) -> list[Any]:
    query = (
        "SELECT trajectory, lineage, context, context_text, train, turns, turn_numbers, tokens, logprobs "
        "FROM completions ORDER BY 1, 2"
    )
    return list(rows(folder, query))


def test_a_run_of_several_lineages_trains_each_once_and_the_title_never(model: Path, tmp_path: Path) -> None:
    summary = run(branching(model, tmp_path), tmp_path / "run")
    text = assert_verifies(tmp_path / "run")
    assert "not to be trained" in text
    assert summary["eval_after"] is not None
    assert summary["trained_trajectories"] == 48
    assert summary["mismatch_kl"] < 1e-6, "the trainer has another context than the engine had"
    made = rows(tmp_path / "run", "SELECT trajectory, lineage, train, context IS NULL FROM completions")
    assert {lineage for _, lineage, _, _ in made} == {0, 1, 2, 3}
    assert all(train == (lineage != 1) for _, lineage, train, _ in made)
    assert all(is_prompt == (lineage == 0) for _, lineage, _, is_prompt in made)
    trained = rows(tmp_path / "run", "SELECT trajectory, lineage FROM members ORDER BY 1, 2")
    assert trained == sorted((id, lineage) for id, lineage, train, _ in made if train)
    query = "SELECT SUM(num_sampled) FROM completions WHERE train"
    assert rows(tmp_path / "run", query) == [(summary["tokens"],)]
    ((text,),) = rows(tmp_path / "run", "SELECT context_text FROM completions WHERE trajectory = 0 AND lineage = 2")
    assert text.startswith("agent ")


def test_a_run_that_is_killed_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    made = branching(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0")
    assert_same_bits_after_a_kill(made, tmp_path, at=2)
    assert lineages_of(tmp_path / "run") == lineages_of(tmp_path / "whole")


def test_a_run_that_is_stopped_goes_on_with_its_lineages_and_can_be_trained_and_scored_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = branching(
        model, tmp_path, "rollout.in_flight=9", "task.config.pause_s=0.02", "task.config.by_turn=true",
        "algorithm.turns.gamma=0.5", "evaluation.prompts=0",
    )  # fmt: skip
    assert run(made, tmp_path / "run", observer=Stops(at=1))["stopped"]
    assert run(made, tmp_path / "run", resume=True)["trained_trajectories"] == 48
    assert_verifies(tmp_path / "run")
    ((note,),) = rows(tmp_path / "run", "SELECT text FROM notes WHERE kind = 'resumed'")
    assert int(note.split()[0]) > 0, note
    for id, numbers in rows(tmp_path / "run", "SELECT trajectory, turn_numbers FROM completions WHERE lineage = 1"):
        assert np.frombuffer(numbers, "<i4").tolist() == [1], id
    assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    (tmp_path / "as a run").mkdir()
    (tmp_path / "again").rename(tmp_path / "as a run" / "policy")
    assert equal(policy(tmp_path / "as a run"), policy(tmp_path / "run"))
    assert main(["verify", str(tmp_path / "run"), "--recompute", "5"]) == 0
    assert "recomputed: 5 of 48 trained trajectories" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "--update", "3"]) == 0
    shown = capsys.readouterr().out
    assert "lineage 1:" in shown
    assert "not trained" in shown


def test_trajectories_that_are_used_again_bring_all_of_their_lineages(model: Path, tmp_path: Path) -> None:
    replay = ("training.replay.ratio=0.5", "rollout.staleness=3")
    run(branching(model, tmp_path, *replay, "evaluation.prompts=0"), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    again = rows(tmp_path / "run", "SELECT trajectory, lineage FROM members WHERE use = 1 ORDER BY 1, 2")
    ids = {id for id, _ in again}
    assert ids
    every = rows(tmp_path / "run", "SELECT trajectory, lineage FROM completions WHERE train ORDER BY 1, 2")
    assert again == [(id, lineage) for id, lineage in every if id in ids]
