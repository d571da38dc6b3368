"""Tables of measurements are made of cells: figures that a cell does not have are left empty, and none is guessed."""

from typing import Any

import pytest

from docs.tools.measured_tables import (
    Run,
    as_markdown,
    curve_of,
    figures_of,
    find_cell,
    held_out,
    ours,
    percent,
    rate_of,
    result,
    rewards_of_versions,
    seconds_to,
    whole,
    whole_test,
)


def run(
    heading: str = "mine", *, updates: int = 6, age: float = 0.0, scores: dict[int, float | None] | None = None
) -> Run:
    by_update = [
        {
            "update": number,
            "tokens": 100 * (number + 1),
            "cycle_seconds": 2.0,
            "staleness_mean": min(age, number),
            "reward_mean": number / 10,
            "elapsed_s": 2.0 * (number + 1),
        }
        for number in range(updates)
    ]
    evaluations = [
        {"version": version, "score": score, "elapsed_s": 2.0 * version} for version, score in (scores or {}).items()
    ]
    results: dict[str, Any] = {"by_update": by_update, "evaluations": evaluations, "wall_s": 2.0 * updates}
    return Run(heading, {"side": "native", "results": results})


def test_an_empty_cell_is_a_space() -> None:
    assert as_markdown(["", "a"], [["b", ""]]) == "| | a |\n|---|---|\n| b | |\n"


def test_figures_that_a_cell_does_not_have_are_left_empty() -> None:
    made = figures_of([run()], {"seconds": result("wall_s", whole), "start": result("startup_s", whole)})
    assert made.splitlines()[2:] == ["| seconds | 12 |", "| start | |"]
    assert whole_test("after_sampled")(run()) == ""
    assert seconds_to(6)(run()) == "12"
    assert seconds_to(7)(run()) == ""


def test_rates_are_tokens_over_seconds_of_the_updates_that_are_named() -> None:
    assert rate_of(1, 6)(run()) == "175"
    assert rate_of(2, 3)(run()) == "125"


def test_rewards_are_by_the_version_that_generated() -> None:
    assert rewards_of_versions(0, 5)(run()) == "0.250"
    assert rewards_of_versions(0, 4)(run(age=1.0)) == "0.250", "versions 0, 0, 1, 2, 3, 4"
    assert rewards_of_versions(1, None)(run()) == "0.300"
    assert rewards_of_versions(2, None)(run()) == "", "four updates are too few"


def test_a_curve_has_a_row_for_each_update_at_which_a_run_was_evaluated() -> None:
    made = curve_of([run("a", scores={0: 0.25, 6: 0.5}), run("b", scores={0: 0.125, 3: 0.75, 6: None})])
    assert made.splitlines() == [
        "| update | a, seconds | a | b, seconds | b |",
        "|---|---|---|---|---|",
        "| 0 | 0 | 0.250 | 0 | 0.125 |",
        "| 3 | | | 6 | 0.750 |",
        "| 6 | 12 | 0.500 | | |",
    ]
    assert held_out(3)(run(scores={3: 0.75})) == "0.750"


def test_small_shares_keep_a_digit() -> None:
    assert (percent(0.413), percent(0.0078), percent(0.0), percent(1.0)) == ("41 %", "0.8 %", "0 %", "100 %")


def test_a_cell_must_be_the_only_one_of_its_kind() -> None:
    with pytest.raises(ValueError, match="has 0 cells"):
        find_cell("gsm8k", "gsm8k", "native", seed=99)
    with pytest.raises(ValueError, match="it must have one"):
        find_cell("gsm8k", "gsm8k", "native", paradigm="multi-version")


def test_the_whole_test_of_a_run_has_the_same_parameters() -> None:
    found = ours("", "gsm8k", model="qwen2.5-coder-1.5b", paradigm="synchronous", seed=0)
    assert found.test is not None
    assert found.test["parameters"] == found.training["parameters"]
