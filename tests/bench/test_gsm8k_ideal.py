"""The ideal gain over `synchronous` is that of the costs behind a run's updates."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.gsm8k_ideal import compared, fit, main

FIXED, PER_TOKEN, TRAINING, LONGEST, BATCH = 0.8, 5e-6, 0.7, 512, 512


def updates(count: int, noise: float = 0.0) -> list[dict[str, float]]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = float(draw.integers(120_000, 160_000))
        rollout = FIXED + PER_TOKEN * tokens + noise * draw.standard_normal()
        seconds = {"cycle_seconds": rollout + TRAINING, "update_seconds": TRAINING}
        found.append({"tokens": tokens, **seconds, "length_mean": tokens / BATCH, "length_max": LONGEST})
    return found


def test_the_fit_finds_the_costs_and_the_gain_that_they_allow():
    ideal = fit(updates(50))
    assert ideal.fixed_s == pytest.approx(FIXED)
    assert ideal.per_token_s == pytest.approx(PER_TOKEN)
    assert ideal.batch == BATCH
    moving = PER_TOKEN * ideal.tokens + TRAINING
    expected = (FIXED + moving) / (FIXED * ideal.tokens / (BATCH * LONGEST) + moving)
    assert ideal.gain(BATCH) == pytest.approx(expected)
    assert ideal.gain(2 * BATCH) > ideal.gain(BATCH)


def test_rollouts_beside_an_evaluation_do_not_count():
    found = updates(50)
    found[7]["cycle_seconds"] += 3.0
    assert fit(found).fixed_s == pytest.approx(FIXED)


def test_noise_is_told_as_an_error():
    ideal = fit(updates(50, noise=0.05))
    assert abs(ideal.fixed_s - FIXED) < 3 * ideal.fixed_error_s
    assert ideal.gain(BATCH, errors=-1.0) < ideal.gain(BATCH) < ideal.gain(BATCH, errors=1.0)


def test_runs_are_compared_with_the_synchronous_one():
    def cell(paradigm: str, rate: float) -> dict[str, object]:
        results = {"by_update": updates(30), "tokens_per_s_undisturbed": rate}
        return {"parameters": {"paradigm": paradigm, "staleness": 2, "updates": 30}, "results": results}

    (found,) = compared([cell("multi-version", 72_000.0), cell("synchronous", 60_000.0)])
    assert found["gain"] == pytest.approx(1.2)
    assert found["of_ideal"] == pytest.approx(1.2 / found["ideal"])
    with pytest.raises(ValueError, match="synchronous"):
        compared([cell("multi-version", 72_000.0)])


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "error: there is no folder `nowhere`"), (".", "error: `.`: no cell of a `synchronous` run")],
)
def test_a_folder_without_cells_is_named(folder, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([folder])
    assert message in capsys.readouterr().err


def test_a_run_of_few_updates_has_no_fit():
    with pytest.raises(ValueError, match="too few"):
        fit(updates(5))
