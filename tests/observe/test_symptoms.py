"""Warnings of a run that cannot learn: when they begin, when they are over, and that a healthy run has none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stretto.observe import symptoms
from stretto.observe.metrics import Totals
from stretto.observe.symptoms import KINDS, OVER, Symptoms

HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "groups": 16.0,
    "groups_without_signal": 6.0,
    "filtered_groups": 0,
    "num_sequences": 128.0,
    "replayed_sequences": 0,
    "truncated": 0.1,
    "length_mean": 20.0,
    "entropy": 0.05,
    "grad_norm": 0.1,
    "mismatch_kl": 1e-5,
    "mismatch_tokens": 100.0,
    "failed": 1,
}
ILL: dict[str, dict[str, Any]] = {
    "reward-constant": {"reward_std": 0.0, "groups_without_signal": 16.0, "grad_norm": 0.0, "reward_mean": 0.0},
    "no-signal": {"groups_without_signal": 16.0, "grad_norm": 0.0},
    "little-signal": {"groups_without_signal": 15.0},
    "truncated": {"truncated": 0.95},
    "entropy-gone": {"entropy": 5e-4},
    "gradient-zero": {"grad_norm": 0.0, "share_without_gradient": 1.0},
    "gradient-not-finite": {"grad_norm": math.inf},
    "mismatch-large": {"mismatch_kl": 0.05},
    "failing": {"failed": 128},
}


def said(*kinds: str) -> list[tuple[list[str], list[str]]]:
    """Adds an update for each kind; `ok` is a healthy one."""
    subject = Symptoms()
    return [subject.add({"update": number, **HEALTHY, **ILL.get(kind, {})}) for number, kind in enumerate(kinds)]


def test_every_kind_is_covered_here_and_in_the_documentation() -> None:
    assert ILL.keys() == OVER.keys()
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in text or f"| `{kind}`" not in str(symptoms.__doc__)] == []


@pytest.mark.parametrize("kind", ILL)
def test_a_symptom_is_told_once_when_it_begins_and_once_when_it_is_over(kind: str) -> None:
    results = said("ok", kind, kind, kind, kind, "ok", "ok", "ok", kind, kind, kind, "ok", "ok", "ok")
    told = {number: sentences for number, (_, sentences) in enumerate(results) if sentences}
    assert list(told) == [3, 7]
    assert all(len(sentences) == 1 for sentences in told.values())
    assert told[3][0].startswith("update 3: the run may not be learning: ")
    assert told[7] == [f"update 7: {OVER[kind]} (the warning of update 3 is over)"]
    assert [number for number, (kinds, _) in enumerate(results) if kinds == [kind]] == [3, 4, 10], (
        "listed while it holds"
    )


@pytest.mark.parametrize("kind", ILL)
def test_two_bad_updates_are_no_symptom(kind: str) -> None:
    assert all(not sentences for _, sentences in said(kind, kind, "ok", kind, kind, "ok"))


def test_a_run_that_is_resumed_warns_as_if_it_had_never_stopped() -> None:
    kinds = ["truncated"] * 9 + ["ok"] * 3
    lines = [{"update": number, **HEALTHY, **ILL.get(kind, {})} for number, kind in enumerate(kinds)]
    straight = Totals()
    judged = [straight.judge(line) for line in lines]
    assert sum(len(each["warnings"]) for each in judged) == 2, "it begins, and it is over"
    for stop in range(len(lines)):
        resumed = Totals.from_json({}, [{"kind": "update", **line} for line in lines[:stop]])
        assert [resumed.judge(line) for line in lines[stop:]] == judged[stop:]


def test_filtered_groups_count_as_groups_without_signal() -> None:
    subject = Symptoms()
    filters = HEALTHY | {"groups_without_signal": 0.0, "filtered_groups": 200, "filtered_reward": 1.0}
    sentences = [text for number in range(3) for text in subject.add({"update": number, **filters})[1]]
    assert len(sentences) == 1
    assert "200 of 216 groups have equal rewards and train nothing (mean reward 1)" in sentences[0]


@pytest.mark.parametrize("kind", ["reward-constant", "no-signal", "little-signal"])
def test_missing_signal_of_completions_that_are_cut_off_is_put_down_to_that(kind: str) -> None:
    subject = Symptoms(run="runs/mine")
    lines = [{"update": number, **HEALTHY, **ILL[kind], "truncated": 0.6, "length_mean": 32.0} for number in range(3)]
    (sentence,) = [text for line in lines for text in subject.add(line)[1]]
    begun = (
        "update 2: the run may not be learning: `rollout.max_tokens` cut off 60% of the completions (mean length 32)"
    )
    assert sentence.startswith(begun)
    assert sentence.endswith("otherwise raise `rollout.max_tokens`, or ask for shorter answers")
    assert "`stretto show runs/mine --update 2`" in sentence
    assert "prompts" not in sentence


def test_missing_signal_of_completions_that_end_by_themselves_is_not() -> None:
    (sentence,) = said("reward-constant", "reward-constant", "reward-constant")[2][1]
    assert "start with easier prompts" in sentence
    assert "max_tokens" not in sentence
    assert "`stretto show RUN --update 2`" in sentence


def test_numbers_that_were_not_measured_are_no_symptom() -> None:
    subject = Symptoms()
    assert [subject.add({"update": number}) for number in range(5)] == [([], [])] * 5
    unmeasured = {**HEALTHY, "mismatch_kl": 1.0, "mismatch_tokens": 0.0}
    assert [subject.add({"update": number, **unmeasured})[1] for number in range(5)] == [[]] * 5


def several(update: int, right: float, brief: float, **more: Any) -> dict[str, Any]:
    """The line of an update without signal, whose two rewards are equal for all."""
    parts = {"reward/right": right, "reward/brief": brief, "constant_rewards": {"right": right, "brief": brief}}
    return {"update": update, **HEALTHY, **ILL["no-signal"], **parts, **more}


def test_a_reward_that_is_0_everywhere_is_named_and_its_prompts_are_not_called_too_easy() -> None:
    subject = Symptoms()
    sentences = [text for number in range(5) for text in subject.add(several(number, 0.0, 1.0), "learnt")[1]]
    assert len(sentences) == 1
    assert "the run may not be learning" in sentences[0]
    assert "`right` is 0 and `brief` is 1 in all completions of the last 3 updates" in sentences[0]
    assert "too easy" not in sentences[0]


def test_prompts_are_too_easy_if_every_reward_is_at_its_top() -> None:
    subject = Symptoms()
    subject.add({**several(0, 0.2, 1.0), "constant_rewards": {"brief": 1.0}}, "unknown")
    sentences = [text for number in range(1, 4) for text in subject.add(several(number, 1.0, 1.0), "learnt")[1]]
    assert len(sentences) == 1
    assert "the prompts may be too easy" in sentences[0]


def test_a_reward_that_fell_is_not_at_its_top() -> None:
    subject = Symptoms()
    subject.add({**several(0, 0.2, 1.0), "constant_rewards": {"brief": 1.0}}, "unknown")
    sentences = [text for number in range(1, 6) for text in subject.add(several(number, 0.0, 1.0), "learnt")[1]]
    assert len(sentences) == 1
    assert "too easy" not in sentences[0]


def test_one_constant_reward_for_every_completion_names_its_parts() -> None:
    subject = Symptoms()
    line = {"reward_std": 0.0, "reward_mean": 0.2}
    sentences = [text for number in range(3) for text in subject.add(several(number, 0.0, 1.0, **line))[1]]
    assert len(sentences) == 1
    assert "every completion gets the reward 0.2 (`right` is 0 and `brief` is 1 in all of them)" in sentences[0]


def test_a_constant_reward_at_its_top_is_named_too() -> None:
    subject = Symptoms()
    line = {"constant_rewards": {"brief": 1.0}, "reward/right": 0.5}
    sentences = [text for number in range(4) for text in subject.add(several(number, 0.5, 1.0, **line))[1]]
    assert len(sentences) == 1
    assert "(mean 0.5; `brief` is 1 in all completions), so that each prompt is too easy or too hard" in sentences[0]
