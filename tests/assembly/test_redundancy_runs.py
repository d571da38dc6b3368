"""Whole runs that start more than they train on. `tests/chaos` kills such runs and has them go on."""

from __future__ import annotations

import json
from pathlib import Path

from run_cases import assert_verifies, recipe, run

from stretto.assembly.retrain import retrain
from stretto.recipe.schema import Recipe


def redundant(model: Path, folder: Path, steps: int) -> Recipe:
    return recipe(
        model, folder, f"training.steps={steps}", "rollout.redundancy={groups=5,members=6}", "rollout.staleness=2",
        "rollout.max_tokens=40", "rollout.spread=always", "runtime.instances=2", "evaluation.prompts=0",
    )  # fmt: skip


def test_a_run_with_redundancy_is_verified_replayed_and_goes_on_with_more_updates(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(redundant(model, tmp_path, 2), folder)
    assert "broken by recipe: " in assert_verifies(folder)
    summary = run(redundant(model, tmp_path, 4), folder, resume=True)
    assert "broken by recipe: " in assert_verifies(folder)
    assert summary["trained_trajectories"] == 4 * 3 * 4
    assert summary["dropped_trajectories"] >= 4 * 3 * 2, "two members of every trained group, and groups"
    assert summary["dropped_complete_trajectories"] <= summary["dropped_trajectories"]
    again = retrain(folder)
    assert (again.difference, again.updates) == (None, 4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["dropped"] for line in lines) <= summary["dropped_trajectories"]
    assert all(line["length_ratio"] > 0 for line in lines)
