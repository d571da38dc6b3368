"""The bench of learning: its cells, its recipes and its verdicts. Nothing is trained here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench import learning
from stretto.objectives import OBJECTIVES
from stretto.recipe.reading import load_recipe


def options(**changes: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "seeds": [0, 1],
        "objectives": ["grpo", "naive"],
        "staleness": [4],
        "named": ["naive"],
        "in_flight": "default",
        "second_task": False,
        "steps": 3,
    }
    return argparse.Namespace(**{**usual, **changes})


def test_every_objective_of_the_package_is_there() -> None:
    types = {table["type"] for table in learning.ALGORITHMS.values()}
    assert types == set(OBJECTIVES) - {"custom", "distill"}  # which learns from no reward
    assert set(learning.NAMED) <= set(learning.ALGORITHMS)


def test_cells_have_names_of_their_own_and_come_seed_by_seed() -> None:
    cells = learning.cells_of(options())
    assert len({cell.name for cell in cells}) == len(cells) == 2 * (2 + 5)
    assert [cell.seed for cell in cells] == [0] * 7 + [1] * 7
    assert [cell.staleness for cell in cells[:7]] == [0, 4, 0, 1, 2, 4, 8]
    full = learning.cells_of(options(in_flight="full"))
    shared = {cell.name for cell in full} & {cell.name for cell in cells}
    assert all(".k0." in name for name in shared)  # synchronous has nothing in flight to choose


@pytest.mark.parametrize("second_task", [False, True])
@pytest.mark.parametrize("in_flight", ["default", "full"])
def test_every_cell_is_a_recipe(tmp_path: Path, second_task: bool, in_flight: str) -> None:
    everything = options(
        seeds=[3], objectives=list(learning.ALGORITHMS), second_task=second_task, in_flight=in_flight, staleness=[4, 8]
    )
    for cell in learning.cells_of(everything):
        recipe = load_recipe(learning.write_recipe(cell, tmp_path / cell.name, 32))
        assert (recipe.seed, recipe.training.steps, recipe.evaluation.prompts) == (3, 3, 32)
        assert recipe.plan.staleness == cell.staleness
        assert recipe.algorithm.type == learning.ALGORITHMS[cell.objective]["type"]
        if cell.staleness and in_flight == "full":
            assert recipe.plan.in_flight == (cell.staleness + 1) * recipe.plan.batch


def test_the_second_task_holds_its_evaluation_out(tmp_path: Path) -> None:
    train, held_out = learning.long_chains(tmp_path, 40)
    prompts = [{json.loads(line)["prompt"] for line in path.read_text().splitlines()} for path in (train, held_out)]
    assert not prompts[0] & prompts[1]
    lines = held_out.read_text().splitlines()
    assert len(lines) == 40
    for line in lines:
        row = json.loads(line)
        x, rest = row["prompt"].rstrip("?").split("+")
        a, n = rest.split("*")
        assert row["answer"] == (int(x) + int(a) * int(n)) % 10
        assert 5 <= int(n) <= 30


def record(objective: str, staleness: int, seed: int, accuracy: float) -> dict[str, Any]:
    summary = {"staleness": {"mean": staleness / 2}}
    return {"objective": objective, "staleness": staleness, "seed": seed, "accuracy": accuracy, "summary": summary}


def test_differences_are_paired_by_seed_and_judged_against_noise() -> None:
    records = [record("grpo", 0, seed, 0.5 + seed / 10) for seed in range(3)]
    records += [record("grpo", 4, seed, 0.48 + seed / 10) for seed in range(3)]  # a little worse, always
    records += [record("grpo", 8, seed, 0.40 + seed / 10) for seed in range(3)]  # clearly worse, without noise
    records += [record("grpo", 2, seed, found) for seed, found in enumerate((0.2, 0.6, 0.7))]  # one does not learn
    records += [record("grpo", 1, 0, 0.9), record("grpo", 1, 7, 0.0)]  # one seed in common, and better
    rows = {row["staleness"]: row for row in learning.compared(records)}
    assert "verdict" not in rows[0]
    assert rows[4]["difference"]["mean"] == pytest.approx(-0.02)
    assert rows[4]["difference"]["standard_error"] == pytest.approx(0, abs=1e-12)
    assert [rows[k]["verdict"] for k in (4, 8, 2)] == ["holds", "falls short", "seeds disagree"]
    assert learning.verdict({"mean": -0.04, "standard_error": 0.025}) == "holds"
    assert "verdict" not in rows[1]  # one seed says nothing
    assert rows[1]["difference"] == {"mean": pytest.approx(0.4), "standard_error": None}
    text = learning.table_of(list(rows.values()))
    assert text.count("falls short") == 1
    assert text.count("holds") == 1


def test_jobs_share_no_cores_and_too_many_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning.os, "sched_getaffinity", lambda _: {3, 4, 5, 8, 9})
    assert learning.core_sets(2, 2) == [[3, 4], [5, 8]]
    assert learning.core_sets(3, 0) == [[], [], []]
    with pytest.raises(SystemExit, match="need 6 cores, and there are 5"):
        learning.core_sets(3, 2)


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = learning.cells_of(options())
    for cell in cells:
        learning.path_of(cell, tmp_path).write_text("{}")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be run")

    monkeypatch.setattr(learning.subprocess, "run", forbidden)
    assert learning.run_all(cells, argparse.Namespace(folder=tmp_path, jobs=1, cores=1)) == []
