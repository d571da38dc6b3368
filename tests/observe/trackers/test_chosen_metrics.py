"""The numbers that trackers get."""

from __future__ import annotations

import math
from pathlib import Path

from tracker_cases import evaluation, update

from stretto.observe.trackers.chosen_metrics import CURATED, chosen, step_of


def test_the_curated_numbers_are_a_dozen_and_two_scores_and_those_that_were_measured() -> None:
    assert len(CURATED["update"]) == 12
    assert chosen(update(3), "curated") == {
        "reward_mean": 0.3,
        "tokens_per_second": 1_000.0,
        "staleness_mean": 1.5,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "length_mean": 12.0,
        "truncated": 0.25,
        "trainer_idle_share": 0.25,
        "failed": 0.0,
    }
    assert chosen(evaluation(7), "curated") == {"score": 0.25, "greedy_score": 0.5}
    assert chosen(evaluation(7) | {"score": None, "greedy": None}, "curated") == {}


def test_all_numbers_include_those_of_inner_tables_and_no_text() -> None:
    numbers = chosen(update(3, mismatch_kl=1e-4) | {"reward/format": 0.5}, "all")
    assert numbers["reward/format"] == 0.5
    assert numbers["staleness_histogram/1"] == 5.0
    assert numbers["mismatch_kl"] == 1e-4
    assert not {"kind", "update", "at", "trainer_waited_for", "warnings"} & numbers.keys()
    assert chosen(evaluation(7), "all")["greedy/num_scored"] == 4.0


def test_a_gradient_that_is_not_finite_is_shown() -> None:
    assert math.isnan(chosen(update(0, grad_norm=math.nan), "curated")["grad_norm"])


def test_steps_are_updates_and_versions() -> None:
    assert (step_of(update(3)), step_of(evaluation(7))) == (3, 7)


def test_the_documentation_lists_the_curated_numbers() -> None:
    text = (Path(__file__).parents[3] / "docs" / "trackers.md").read_text(encoding="utf-8")
    assert [name for names in CURATED.values() for name in names if f"`{name}`" not in text] == []
