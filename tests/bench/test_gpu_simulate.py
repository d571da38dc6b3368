"""Simulated runs on one device: exact where they can be reckoned by hand, and near what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import simulate
from bench.gpu.cells import read_cells
from bench.gpu.costs import StepCost

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "gpu"


def test_a_synchronous_run_takes_its_longest_rows_and_its_training_one_after_the_other() -> None:
    costs = simulate.Costs(StepCost(a=1.0, b=0.0, c=0.0), training=0.5, decode_share=0.5, training_share=0.5)
    lengths = [3, 1, 2, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1]
    plan = simulate.plan_of("synchronous", groups=1, updates=2, staleness=0, in_flight=1)
    results = simulate.Run(plan, lengths, prompt=0, costs=costs).run()
    assert results["wall_s"] == (3 + 11 * 0.5) + (5 + 12 * 0.5)
    assert results["tokens_per_s"] == 23 / results["wall_s"]
    assert results["training_s_per_update"] == 23 * 0.5 / 2
    assert results["row_idle_share"] == pytest.approx(1 - 23 / (8 * results["wall_s"]))


def test_both_at_once_slow_each_other_by_the_measured_shares() -> None:
    costs = simulate.Costs(StepCost(a=1.0, b=0.0, c=0.0), training=1.0, decode_share=0.25, training_share=0.5)
    plan = simulate.plan_of("one-step-off", groups=1, updates=2, staleness=1, in_flight=1)
    results = simulate.Run(plan, [1] * 8 + [4] * 8, prompt=0, costs=costs).run()
    # One step; then 8 s of training alone take 16 s beside decode, in which 4 steps take 16 s; then 32 s of training.
    assert results["wall_s"] == 1 + 16 + 32


@pytest.mark.parametrize("paradigm", ["one-step-off", "partial", "drop", "multi-version"])
def test_every_paradigm_comes_to_its_end_and_keeps_its_bound(paradigm: str) -> None:
    costs = simulate.Costs(StepCost(a=2e-3, b=3e-6, c=3e-8), training=1e-5, decode_share=0.5, training_share=0.7)
    plan = simulate.plan_of(paradigm, groups=4, updates=6, staleness=2, in_flight=2)
    results = simulate.simulate(plan, "tiny", 8, costs)
    assert results["staleness_max"] <= plan.staleness
    assert (results["dropped_share"] > 0) == (paradigm == "drop")
    assert results["ideal_share"] > 0
    assert results["seconds_per_update"] * 6 == pytest.approx(results["wall_s"])


def test_measured_runs_are_simulated_within_a_tenth() -> None:
    found = simulate.check(read_cells([RESULTS]), "1.7B")
    errors = {
        (each["parameters"]["paradigm"], each["parameters"]["groups"], each["parameters"]["updates"]): round(
            each["simulated"]["wall_s"] / each["measured"]["wall_s"] - 1, 3
        )
        for each in found
    }
    assert len(errors) >= 5
    assert all(abs(error) < 0.1 for error in errors.values()), errors


def test_the_table_leaves_out_what_a_bound_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "simulated.json"
    given = ["--groups", "2", "--updates", "3", "--tail", "tiny", "--prompt", "8", "--out", str(out)]
    assert simulate.main([*given, "--staleness", "1,4", "--in-flight", "2,4"]) == 0
    made = [tuple(each["parameters"][name] for name in ("paradigm", "staleness", "in_flight")) for each in _read(out)]
    assert len(made) == len(set(made))
    assert {("multi-version", 1, 2.0), ("multi-version", 4, 4.0)} <= set(made)
    assert ("multi-version", 1, 4.0) not in made
    assert made.count(("synchronous", 0, 1.0)) == 1
    assert "| synchronous | 0 | 1 batches |" in capsys.readouterr().out


def test_missing_cells_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no three `step` cells of 1\.7B: run `python -m bench\.gpu\.costs"):
        simulate.main(["--known", str(tmp_path)])


def _read(path: Path) -> list[dict[str, dict[str, object]]]:
    return json.loads(path.read_text())
