"""Whole runs over the real engine and trainer that filter groups, draw by pass rate and use groups again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Dies, interrupt_during
from rich.console import Console
from run_cases import assert_verifies, equal, policy, recipe, rows, run, story

from stretto.observe.show import show
from stretto.observe.summary import summary_table
from stretto.recipe.schema import Recipe

FILTER = "rollout.filter=no-signal"
BY_RATE = "task.order=pass-rate"
REPLAY = "training.replay={ratio = 0.67, uses = 2}"


def made(model: Path, folder: Path, *overrides: str) -> Recipe:
    return recipe(model, folder, "training.steps=5", "evaluation.prompts=0", *overrides, reward="often_solved")


def shown(folder: Path, summary: Mapping[str, Any]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    console.print(show(folder))
    console.print(summary_table(summary))
    return stream.getvalue()


def test_a_run_with_all_three_verifies_and_shows_what_was_filtered_and_used_again(model: Path, tmp_path: Path) -> None:
    summary = run(made(model, tmp_path, FILTER, BY_RATE, REPLAY, "rollout.staleness=3"), tmp_path / "run")
    text = assert_verifies(tmp_path / "run")
    assert summary["filtered_groups"] > 0
    assert summary["replayed_groups"] > 0
    assert summary["trained_trajectories"] == 5 * 3 * 4
    assert f"{summary['filtered_trajectories']} filtered" in text
    assert f"60 trained once, {summary['replayed_trajectories']} later uses" in text
    equal_rewards = "SELECT group_id FROM trajectories GROUP BY group_id HAVING MIN(reward) = MAX(reward)"
    filtered = rows(tmp_path / "run", "SELECT DISTINCT group_id FROM trajectories WHERE state = 'filtered'")
    assert set(filtered) == set(rows(tmp_path / "run", equal_rewards))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_sequences"] - line["replayed_sequences"] for line in lines] == [12] * 5
    assert sum(line["filtered_groups"] for line in lines) == summary["filtered_groups"]
    seen = shown(tmp_path / "run", summary)
    assert "reused" in seen
    assert "filtered groups" in seen
    assert "mean length filtered / trained" in seen


@pytest.mark.parametrize("options", [(FILTER,), (BY_RATE,), (FILTER, BY_RATE)], ids=["filter", "pass rate", "both"])
def test_a_synchronous_run_that_was_stopped_ends_with_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    asked = made(model, tmp_path, "rollout.paradigm=synchronous", *options)
    whole = run(asked, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_during(patch, 2)
        assert run(asked, tmp_path / "run")["stopped"]
    summary = run(asked, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert story(tmp_path / "run") == story(tmp_path / "whole")
    assert equal(policy(tmp_path / "run"), policy(tmp_path / "whole"))
    draws = "SELECT row_number, epoch, draw FROM groups ORDER BY group_id"
    assert rows(tmp_path / "run", draws) == rows(tmp_path / "whole", draws)
    for name in ("filtered_groups", "filtered_length", "filtered_reward", "length_ratio", "trained_trajectories"):
        assert summary[name] == whole[name], name


def test_a_killed_run_filters_draws_and_uses_again_as_its_journal_has_it(model: Path, tmp_path: Path) -> None:
    asked = made(model, tmp_path, FILTER, BY_RATE, REPLAY, "rollout.staleness=2", "runtime.checkpoint_seconds=0.000001")
    with pytest.raises(KeyError):
        run(asked, tmp_path / "run", observer=Dies(at=3))
    summary = run(asked, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert (summary["steps"], summary["trained_trajectories"]) == (5, 60)
    counts = dict(rows(tmp_path / "run", "SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    assert counts == {"trained": 60, "filtered": summary["filtered_trajectories"]}
    ((uses,),) = rows(tmp_path / "run", "SELECT COUNT(*) FROM members WHERE use > 0")
    assert uses == summary["replayed_trajectories"] > 0
