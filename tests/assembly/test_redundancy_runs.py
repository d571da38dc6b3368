"""Runs that start more than they train on: they are killed, extended, changed, verified and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_cases import assert_verifies, recipe, rows, run

from stretto.assembly.retrain import retrain
from stretto.cli import main
from stretto.recipe.schema import Recipe
from stretto.store.overview import overview
from stretto.view.api import Api
from stretto.view.runs import open_runs

MORE = ("rollout.redundancy.groups=6", "rollout.redundancy.members=6", "evaluation.prompts=0")
ENDS = "SELECT state, COUNT(*) FROM trajectories GROUP BY state"


@pytest.mark.parametrize("paradigm", ["multi-version", "one-step-off"])
def test_a_run_with_redundancy_ends_and_goes_on_with_more_updates_and_another_bound(
    model: Path, tmp_path: Path, paradigm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = tmp_path / "run", (*MORE, f'rollout.paradigm="{paradigm}"')
    assert run(recipe(model, tmp_path, *options), folder)["steps"] == 3
    assert_verifies(folder)
    assert dict(rows(folder, ENDS))["trained"] == 3 * 12
    changed = ("rollout.staleness=3", "rollout.in_flight=3") if paradigm == "multi-version" else ()
    summary = run(recipe(model, tmp_path, *options, *changed, "training.steps=6"), folder, resume=True)
    assert summary["steps"] == 6
    ends = dict(rows(folder, ENDS))
    assert ends.keys() == {"trained", "dropped"}
    assert ends["trained"] == 6 * 12
    assert f"broken by recipe: {ends['dropped']};" in assert_verifies(folder)
    assert retrain(folder).difference is None

    assert (overview(folder).state, overview(folder).updates) == ("finished", 6)
    assert main(["show", str(folder)]) == 0
    assert "3 prompts x 4, of 6 x 6" in capsys.readouterr().out
    page = Api(open_runs([folder]))
    assert page.answer("state", {})["counts"] == ends
    found = page.answer("trajectories", {"state": "dropped", "limit": "500"})
    assert found["matching"] == ends["dropped"]
    for row in found["rows"][:5]:
        assert page.answer("trajectory", {"id": str(row["trajectory"])})["state"] == "dropped"
        assert len(page.answer("group", {"id": str(row["group"])})["members"]) == 6


def redundant(model: Path, folder: Path, steps: int) -> Recipe:
    return recipe(
        model, folder, f"training.steps={steps}", "rollout.redundancy={groups=5,members=6}", "rollout.staleness=2",
        "rollout.max_tokens=40", "rollout.spread=always", "runtime.instances=2", "evaluation.prompts=0",
    )  # fmt: skip


def test_a_run_with_redundancy_over_two_instances_goes_on_with_more_updates(model: Path, tmp_path: Path) -> None:
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
