"""The trend of the reward: a run that learns, or has learnt, gets no warning, and one that does not gets them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.observe.metrics import Totals
from stretto.observe.reward_trend import CLEAR, LEARNT, LEAST, NEAR, PAST, RECENT, RewardTrend

# 80 updates in the shape of `examples/notebook.ipynb`: 8 tokens, all of them cut off, digits are rewarded.
REWARD_MEAN = (
    "0.057 0.102 0.104 0.146 0.227 0.275 0.330 0.369 0.434 0.490 0.488 0.621 0.553 0.611 0.662 0.729 0.750 0.764 "
    "0.783 0.844 0.844 0.855 0.891 0.879 0.922 0.939 0.943 0.953 0.949 0.963 0.961 0.969 0.971 0.975 0.969 0.973 "
    "0.975 0.986 0.986 0.982 0.984 0.982 0.994 0.996 0.994 0.994 0.988 0.990 0.996 0.996 0.996 0.994 0.990 0.990 "
    "0.996 0.992 0.996 0.996 0.998 0.994 0.996 1.000 1.000 1.000 0.998 0.986 0.996 1.000 0.998 1.000 1.000 0.996 "
    "1.000 0.996 1.000 1.000 1.000 1.000 1.000 0.998 "
)
REWARD_STD = (
    "0.091 0.119 0.107 0.142 0.154 0.195 0.207 0.211 0.181 0.209 0.206 0.168 0.183 0.153 0.160 0.168 0.159 0.136 "
    "0.129 0.155 0.125 0.133 0.105 0.113 0.098 0.091 0.076 0.075 0.072 0.065 0.066 0.058 0.061 0.055 0.117 0.052 "
    "0.055 0.039 0.039 0.043 0.041 0.049 0.026 0.022 0.026 0.026 0.036 0.034 0.022 0.022 0.022 0.026 0.034 0.034 "
    "0.022 0.030 0.022 0.022 0.016 0.026 0.022 0.000 0.000 0.000 0.016 0.094 0.022 0.000 0.016 0.000 0.000 0.022 "
    "0.000 0.022 0.000 0.000 0.000 0.000 0.000 0.016 "
)
TRUNCATED = (
    "0.94 1.00 0.94 0.95 0.97 0.95 0.98 0.89 0.98 0.97 1.00 1.00 1.00 1.00 0.98 1.00 0.98 0.98 1.00 1.00 1.00 "
    "1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 0.98 1.00 1.00 1.00 1.00 1.00 1.00 1.00 "
    "1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 "
    "1.00 1.00 0.98 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 "
)
ENTROPY = (
    "4.20 4.17 4.14 4.14 4.04 3.98 3.69 3.77 3.39 3.57 3.52 3.17 3.38 3.29 3.01 2.89 2.79 2.72 2.73 2.46 2.44 "
    "2.26 2.18 2.33 2.10 1.93 1.82 1.90 1.78 1.74 1.80 1.70 1.79 1.73 1.69 1.69 1.64 1.66 1.62 1.63 1.58 1.60 "
    "1.57 1.54 1.59 1.52 1.51 1.50 1.42 1.52 1.60 1.46 1.47 1.45 1.46 1.43 1.43 1.38 1.18 1.42 1.20 1.01 0.88 "
    "1.28 0.94 0.95 1.07 0.72 0.86 0.90 0.72 0.92 1.06 0.88 0.87 0.85 0.92 0.78 0.91 0.98 "
)
SAMPLE_SIZE = (
    "1.00 0.23 0.19 0.45 0.45 0.37 0.49 0.56 0.57 0.61 0.58 0.66 0.82 0.84 0.75 0.76 0.74 0.84 0.74 0.72 0.84 "
    "0.70 0.70 0.72 0.88 0.69 0.84 0.80 0.92 0.90 0.93 0.88 0.91 0.69 0.84 0.81 0.85 0.78 0.83 0.82 0.84 0.78 "
    "0.98 0.94 0.65 0.89 0.81 0.86 0.92 0.63 0.96 0.83 0.64 0.85 0.59 0.94 0.80 0.97 0.97 0.88 0.97 1.00 1.00 "
    "1.00 0.93 0.98 0.95 1.00 0.85 1.00 1.00 0.96 1.00 0.96 1.00 1.00 1.00 1.00 1.00 0.98 "
)
WITHOUT_SIGNAL = (
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 2 1 1 2 1 3 3 4 2 4 4 5 6 5 5 4 3 6 6 6 5 3 3 "
    "6 5 6 6 7 6 6 8 8 8 7 6 6 8 7 8 8 6 8 6 8 8 8 8 8 7 "
)


def notebook() -> list[dict[str, Any]]:
    names = ("reward_mean", "reward_std", "truncated", "entropy", "effective_sample_size", "groups_without_signal")
    texts = (REWARD_MEAN, REWARD_STD, TRUNCATED, ENTROPY, SAMPLE_SIZE, WITHOUT_SIGNAL)
    columns = (map(float, text.split()) for text in texts)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def told(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Returns every warning of a run of 8 groups of 8."""
    totals = Totals()
    whole = {"groups": 8.0, "num_sequences": 64.0, "length_mean": 8.0, "grad_norm": 0.1}
    return [
        text
        for number, line in enumerate(lines)
        for text in totals.judge({"update": number, **whole, **line})["warnings"]
    ]


def run_of(rewards: Iterable[float], seed: int = 0, **also: float) -> Iterator[dict[str, Any]]:
    """Yields lines of a run that cuts off everything, with these rewards and a little noise."""
    draw = random.Random(seed)
    for reward in rewards:
        noisy = reward + draw.uniform(-0.02, 0.02)
        yield {"reward_mean": noisy, "reward_std": 0.3, "truncated": 1.0, "groups_without_signal": 0.0, **also}


def test_a_run_of_the_notebook_is_told_once_that_its_prompts_are_too_easy_and_nothing_else() -> None:
    said = told(notebook())
    assert len(said) == 1
    assert said[0].startswith("update 63: the prompts may be too easy: 8 of 8 groups have equal rewards (mean 1)")
    assert "learning_rate" not in said[0]


def test_the_same_lines_with_a_reward_that_does_not_rise_are_warned_of() -> None:
    draw = random.Random(0)
    flat = [{**line, "reward_mean": draw.uniform(0.08, 0.12), "reward_std": 0.1} for line in notebook()]
    assert "cut off" in "".join(told(flat[:20]))


def test_a_real_run_in_the_shape_of_the_notebook_prints_no_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def digits(prompt: str, completion: str, answer: int) -> float:
        return sum(character.isdigit() for character in completion) / 8

    recipe = {
        "model": {"path": "tiny", "warm_start": {"steps": 0}},
        "rollout": {"prompts": 8, "group": 8, "max_tokens": 8},
        "training": {"steps": 25, "learning_rate": 2e-3},
    }
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(20) for b in range(10)]
    run = stretto.train(recipe, {"evaluation.prompts": 16}, reward=digits, data=rows, out=tmp_path / "run")
    assert run.metrics()["warnings"] == [[]] * 25
    assert run.metrics()["truncated"][-1] > 0.95, "what would be warned of otherwise"
    assert "the run may" not in capfd.readouterr().err


@pytest.mark.parametrize("seed", range(10))
def test_truncation_is_no_symptom_while_the_reward_rises_and_one_when_it_stops_too_low(seed: int) -> None:
    rising = [0.1 + 0.02 * number for number in range(25)]
    assert told(run_of(rising, seed)) == []
    said = told(run_of(rising + [0.6] * 40, seed))
    assert len(said) == 1
    assert "`rollout.max_tokens` cut off 100%" in said[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_flat_run_is_warned_of_soon(seed: int) -> None:
    said = told(run_of([0.3] * 20, seed))
    assert len(said) == 1
    assert int(said[0].split(":")[0].removeprefix("update ")) < 2 * LEAST + 2 * RECENT


def test_entropy_that_is_gone_is_no_symptom_of_a_solved_task_and_one_of_a_fall() -> None:
    learns = [{"reward_mean": min(1.0, number / 30), "reward_std": 0.3, "entropy": 2.0} for number in range(30)]
    solved = [{"reward_mean": 0.99, "reward_std": 0.03, "entropy": 1e-5, "effective_sample_size": 0.01}] * 30
    falls = [{"reward_mean": 0.2, "reward_std": 0.0, "entropy": 1e-5, "groups_without_signal": 8.0}] * 10
    assert told(learns + solved) == []
    said = told(learns + solved + falls)
    assert [word for word in ("every completion gets the reward 0.2", "entropy is 1.0e-05") if word in str(said)] == [
        "every completion gets the reward 0.2",
        "entropy is 1.0e-05",
    ]


def test_a_reward_that_was_never_anything_else_is_not_learnt() -> None:
    dead = {"reward_mean": 0.0, "reward_std": 0.0, "groups_without_signal": 8.0, "grad_norm": 0.0}
    said = told([dead] * 10)
    assert len(said) == 1
    assert "every completion gets the reward 0;" in said[0]


def test_a_mismatch_is_warned_of_though_the_reward_rises() -> None:
    lines = [{**line, "mismatch_kl": 0.2, "mismatch_tokens": 9.0} for line in run_of([0.02 * n for n in range(25)])]
    assert ["diverge by 0.2" in text for text in told(lines)] == [True]


def test_noise_is_rarely_a_rise() -> None:
    draw, trend = random.Random(1), RewardTrend()
    outlooks = [trend.add({"reward_mean": draw.gauss(0.5, 0.05), "reward_std": 0.4}) for _ in range(3_000)]
    assert outlooks.count("rising") < 0.03 * 3_000
    assert outlooks.count("learnt") == 0
    assert outlooks[: 2 * LEAST] == ["unknown"] * (2 * LEAST - 1) + [outlooks[2 * LEAST - 1]]


def test_lines_without_a_reward_have_no_trend() -> None:
    trend = RewardTrend()
    assert {trend.add({}), trend.add({"reward_mean": float("nan")})} == {"flat"}


def test_the_documentation_has_the_bounds() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for bound in (
        f"the last {RECENT} updates",
        f"up to {PAST} before",
        f"{CLEAR:.0f} standard errors",
        f"{LEARNT:.0f} times the standard deviation",
        f"within {NEAR:.0%}".replace("%", " %"),
        f"{2 * LEAST} updates",
    ):
        assert bound in text, bound
