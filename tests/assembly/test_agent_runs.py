"""Whole runs of agents over the real engine and trainer: trained, killed, resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_cases import agents
from run_cases import assert_verifies, rows, run, story

from stretto.assembly.check import check
from stretto.observe.progress import Silent

pytest.importorskip("stretto.chat")


class Dies(Silent):
    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == 1:
            raise KeyError("as if it were killed here")


def test_a_program_that_knows_nothing_of_us_is_trained_and_evaluated(model: Path, tmp_path: Path) -> None:
    made = agents(model, tmp_path)
    assert "played by" in str(check(made))
    summary = run(made, tmp_path / "run")
    assert summary["trained_trajectories"] == 24
    assert summary["eval_after"] is not None
    assert summary["mismatch_kl"] < 1e-6
    assert_verifies(tmp_path / "run")
    rewards = {reward for (reward,) in rows(tmp_path / "run", "SELECT reward FROM trajectories")}
    assert len(rewards) > 1


def test_a_run_of_agents_that_is_killed_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    made = agents(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0")
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies())
    run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    run(made, tmp_path / "whole")
    assert story(tmp_path / "run") == story(tmp_path / "whole")
