"""The native bench of GSM8K: what a cell says of a run, its recipes, and a tiny run of it on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import gsm8k
from bench.gpu.problems import read_problems, score, write_tiny_problems
from stretto.environments.rewards.mathematics import reward

torch.set_num_threads(1)


def update(number: int, at: float, cycle: float, tokens: int) -> dict[str, Any]:
    return {"kind": "update", "update": number, "at": at, "cycle_seconds": cycle, "tokens": tokens, "length_mean": 10.0}


def evaluation(version: int, moment: str, at: float, seconds: float, found: float) -> dict[str, Any]:
    made = {"kind": "evaluation", "version": version, "moment": moment, "score": found}
    return {**made, "num_scored": 4, "num_failed": 0, "mean_tokens": 10.0, "at": at, "seconds": seconds}


# Started at 100, evaluated until 110, the first group at 111; updates end at 121, 125, 129, 133.
LINES = [
    evaluation(0, "before", 110.0, 6.0, 0.25),
    update(0, 121.0, 10.0, 100),
    update(1, 125.0, 4.0, 200),
    update(2, 129.0, 4.0, 300),
    evaluation(2, "during", 130.0, 5.0, 0.5),
    update(3, 133.0, 4.0, 400),
    evaluation(4, "after", 140.0, 6.0, 0.75),
]
SUMMARY = {
    "wall_seconds": 22.0,
    "tokens_per_second": 1_000 / 22,
    "eval_before": 0.25,
    "eval_after": 0.75,
    "trainer_idle_share": 0.1,
    "rollout_idle_share": 0.2,
    "row_idle_share": 0.3,
    "staleness": {"mean": 0.9, "max": 2},
    "trained_length": 10.0,
    "truncated_trajectories": 1,
    "failed_trajectories": 0,
    "mismatch_kl": 1e-4,
}


def test_a_point_of_the_curve_stands_where_its_version_was_ready() -> None:
    curve = gsm8k.Timeline.of(LINES).curve()
    assert [(point["version"], point["elapsed_s"], point["after_first_s"], point["score"]) for point in curve] == [
        (0, 0.0, 0.0, 0.25),
        (2, 14.0, 4.0, 0.5),
        (4, 22.0, 12.0, 0.75),
    ]


def test_startup_is_without_the_first_evaluation_and_the_first_update_is_apart() -> None:
    results = gsm8k.results_of(LINES, SUMMARY, started=100.0)
    assert results["startup_s"] == 5.0
    assert results["first_update_s"] == 10.0
    assert results["seconds_per_update"] == 4.0
    assert results["tokens_per_s_after_first"] == 900 / 12
    assert results["eval_best"] == 0.75
    assert [line["elapsed_s"] for line in results["by_update"]] == [10.0, 14.0, 18.0, 22.0]


def test_updates_beside_an_evaluation_do_not_count_as_undisturbed() -> None:
    results = gsm8k.results_of(LINES, SUMMARY, started=100.0)
    assert results["updates_undisturbed"] == 1  # that of the end at 125: the evaluation began then
    assert results["tokens_per_s_undisturbed"] == 200 / 4


def options(**changes: Any) -> Any:
    made = gsm8k.parser_of().parse_args(["--model", "somewhere/model", "--problems", "problems"])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_every_cell_is_a_recipe_with_the_paradigm_and_bound_that_it_names() -> None:
    chosen = options(paradigms=["synchronous", "multi-version"], staleness=[1, 4], seeds=[0, 1], updates=7)
    cells = gsm8k.cells_of(chosen)
    assert [(cell.parameters["seed"], cell.parameters["staleness"]) for cell in cells] == [
        (0, 0), (0, 1), (0, 4), (1, 0), (1, 1), (1, 4),
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        recipe = gsm8k.recipe_of(cell, chosen)
        assert recipe.plan.staleness == cell.parameters["staleness"]
        assert recipe.plan.paradigm.name == cell.parameters["paradigm"]
        assert (recipe.seed, recipe.training.steps) == (cell.parameters["seed"], 7)
        assert (recipe.model.path, recipe.evaluation.prompts) == ("somewhere/model", 512)
        assert not recipe.evaluation.greedy, "what is timed beside training is the same as in TRL's runs"


def test_the_recipe_is_what_was_announced() -> None:
    (cell,) = gsm8k.cells_of(options())
    recipe = gsm8k.recipe_of(cell, options())
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 32
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.max_tokens) == (64, 8, 512)
    assert (recipe.training.learning_rate, recipe.training.micro_tokens) == (5e-5, "auto")


def test_a_score_counts_right_answers_and_what_was_cut_off(tmp_path: Path) -> None:
    problems = read_problems(write_tiny_problems(tmp_path), "test", 2)
    texts = [f"it is {problems[0]['answer']}", "no idea"]
    found = score(reward, problems, texts, [5, 8], 8)
    assert (found.accuracy, found.num_problems, found.mean_tokens, found.truncated) == (0.5, 2, 6.5, 0.5)


def test_missing_problems_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"python examples/gsm8k\.py"):
        read_problems(tmp_path, "train")


def test_a_tiny_run_leaves_both_cells_and_the_test_uses_the_trained_adapter(tmp_path: Path) -> None:
    out, runs = tmp_path / "cells", tmp_path / "runs"
    assert gsm8k.main(["--tiny", "--out", str(out), "--runs", str(runs)]) == 0
    cells = {record["bench"]: record for record in (json.loads(path.read_text()) for path in out.glob("*.json"))}
    trained, tested = cells["gsm8k"]["results"], cells["gsm8k-test"]["results"]
    assert trained["updates"] == 2
    assert [line["update"] for line in trained["by_update"]] == [0, 1]
    assert trained["startup_s"] > 0
    assert (trained["in_flight"], trained["rows"]) == (3, 4), "the defaults of two groups of two on a CPU"
    assert trained["evaluations"][0]["moment"] == "before"
    for moment in ("before", "after"):
        for way in ("sampled", "greedy"):
            assert tested[moment][way]["num_problems"] == 6
    (policy,) = runs.glob("*/policy")
    before, after = gsm8k.adapters(policy, "cpu", torch.float32)
    assert before.tensors.keys() == after.tensors.keys()
    assert all(not tensor.any() for tensor in before.tensors.values())
    assert all(name.endswith(("lora_A", "lora_B")) for name in after.tensors)
    assert any(tensor.any() for tensor in after.tensors.values())
    assert before.checksum != after.checksum
