import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_cases import random_batch, tiny

from stretto.objectives import OBJECTIVES
from stretto.objectives.correction_options import CorrectionOptions, DiscrepancyOptions, StalenessOptions
from stretto.objectives.length_options import OverlongOptions
from stretto.objectives.regularizer_options import EntropyOptions, KlOptions, SupervisedOptions
from stretto.objectives.teacher_options import TeacherOptions
from stretto.observe.metrics import Tally
from stretto.training.advantages import group_relative
from stretto.training.packing import micro_batch
from stretto.training.trainer import LocalTrainer, LoraOptions
from stretto.training.update_metrics import (
    TokenCollector,
    TokenValues,
    batch_metrics,
    divergences,
    effective_sample_size,
    mismatch,
    staleness_metrics,
    token_ages,
    token_metrics,
)
from stretto.types import Batch, UpdateReport


def values(log_ratios, samples=None, **others) -> TokenValues:
    ratios = np.asarray(log_ratios, dtype=np.float64)
    owner = np.zeros(len(ratios), dtype=np.int64) if samples is None else np.asarray(samples)
    return TokenValues(owner, ratios, np.zeros(len(ratios)), others.pop("diagnostics", {}), **others)


def in_order(batch: Batch, log_ratio: float) -> TokenValues:
    """Every token of a batch, its samples in order, with a log-ratio of its sample's age times `log_ratio`."""
    owner = np.repeat(np.arange(len(batch.samples)), [len(s.completion.tokens) for s in batch.samples])
    ages = batch.update - np.array([s.version for s in batch.samples])
    return values(log_ratio * ages[owner], owner)


def aged_batch() -> Batch:
    """Twelve samples at update 3: six of version 3, three of version 2, three of version 0."""
    batch = random_batch(update=3)
    versions = [3] * 6 + [2] * 3 + [0] * 3
    return Batch(3, [replace(s, version=v) for s, v in zip(batch.samples, versions, strict=True)])


def test_ratios_are_of_the_anchor_and_weights_of_the_policy_that_sampled():
    measured = token_metrics(values(np.log([0.5, 1.0, 2.0]), anchor_log_ratios=np.zeros(3)))
    assert [measured[f"ratio_{q}"] for q in ("min", "p01", "p50", "p99", "max")] == [1.0] * 5
    assert measured["weight_p50"] == pytest.approx(1.0)
    assert measured["weight_max"] == pytest.approx(2.0)
    assert measured["weight_p99"] == pytest.approx(np.quantile([0.5, 1.0, 2.0], 0.99))
    unwatched = token_metrics(values(np.log([0.5, 1.0, 2.0])))
    assert unwatched["ratio_max"] == pytest.approx(2.0)
    assert "share_without_gradient" not in unwatched


def test_effective_sample_size_is_told_of_tokens_and_of_sequences():
    # Within a sequence the weights cancel: as sequences all weigh alike, as tokens they do not.
    measured = token_metrics(values(np.log([2.0, 0.5, 0.5, 2.0]), [0, 0, 1, 1]))
    assert measured["effective_sample_size"] == pytest.approx(1.0)
    assert measured["token_effective_sample_size"] == pytest.approx(5.0**2 / (4 * 8.5))


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=30))
def test_effective_sample_size_lies_between_one_sample_and_all(log_weights):
    size = effective_sample_size(np.array(log_weights))
    assert 1 / len(log_weights) - 1e-9 <= size <= 1 + 1e-9


def test_no_tokens_have_no_measures():
    assert token_metrics(values([])) == {}


def test_divergences_go_by_the_age_of_the_data():
    batch = aged_batch()
    tokens = in_order(batch, 0.1)
    found = staleness_metrics(batch, tokens)
    assert set(found) == {"staleness_kl", "staleness_kl_age_1", "staleness_kl_age_3"}
    assert found["staleness_kl_age_1"] == pytest.approx(np.exp(0.1) - 1.1)
    assert found["staleness_kl_age_3"] == pytest.approx(np.exp(0.3) - 1.3)
    counts = [int((token_ages(batch, tokens) == age).sum()) for age in (1, 3)]
    mean = np.average([found["staleness_kl_age_1"], found["staleness_kl_age_3"]], weights=counts)
    assert found["staleness_kl"] == pytest.approx(mean)
    found = mismatch(batch, tokens)
    fresh = sum(len(s.completion.tokens) for s in batch.samples[:6])
    assert (found.kl_sum, found.tokens) == (0.0, fresh)
    assert found.metrics == {"mismatch_kl": 0.0, "mismatch_tokens": float(fresh), "mismatch_kl_age_0": 0.0}


def test_engine_and_trainer_are_compared_where_tokens_were_scored_and_where_they_are_fresh():
    batch = aged_batch()
    tokens = in_order(batch, 0.1)
    ages = token_ages(batch, tokens)
    scored = (ages == 3) & (np.arange(len(ages)) % 2 == 0)
    discrepancies = np.where(scored, 0.2, 7.0)  # which counts for nothing where a token was not scored
    found = mismatch(batch, replace(tokens, discrepancies=discrepancies, is_scored=scored.astype(np.float64)))
    fresh, total = int((ages == 0).sum()), (np.exp(0.2) - 1.2) * int(scored.sum())
    assert found.tokens == fresh + int(scored.sum())
    assert found.kl_sum == pytest.approx(total)
    assert found.metrics == {
        "mismatch_kl": pytest.approx(total / found.tokens),
        "mismatch_tokens": float(found.tokens),
        "mismatch_kl_age_0": 0.0,
        "mismatch_kl_age_3": pytest.approx(np.exp(0.2) - 1.2),
    }


def test_nothing_is_compared_where_nothing_is_fresh_or_scored():
    batch = Batch(3, [replace(sample, version=1) for sample in random_batch(update=3).samples])
    found = mismatch(batch, in_order(batch, 0.1))
    assert (found.kl_sum, found.tokens) == (0.0, 0)
    assert found.metrics == {"mismatch_kl": 0.0, "mismatch_tokens": 0.0}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_divergences_are_finite_and_never_negative(log_ratios):
    found = divergences(np.array(log_ratios))
    assert (found >= 0).all()
    assert (found <= np.exp(20.0)).all()


def test_a_divergence_is_that_of_its_log_ratio():
    assert divergences(np.array([0.0, 0.3, -0.3])) == pytest.approx([0.0, np.exp(0.3) - 1.3, np.exp(-0.3) - 0.7])


def test_fresh_data_has_no_divergence_by_staleness():
    batch = random_batch(update=2)
    assert staleness_metrics(batch, in_order(batch, 0.1)) == {"staleness_kl": 0.0}


def test_tokens_of_a_trajectory_that_was_continued_have_ages_of_their_own():
    batch = aged_batch()
    first = batch.samples[0]
    count = len(first.completion.tokens)
    own = np.full(count, 3, dtype=np.int32)
    own[0] = 1
    continued = replace(first, completion=replace(first.completion, token_versions=own))
    batch = Batch(3, [continued, *batch.samples[1:]])
    order = [2, 0, 1]  # as a micro-batch may lie
    owner = np.repeat(order, [len(batch.samples[i].completion.tokens) for i in order])
    ages = token_ages(batch, values(np.zeros(len(owner)), owner))
    assert ages[owner == 0].tolist() == [2] + [0] * (count - 1)
    assert not ages[owner != 0].any()


def test_advantages_are_told_by_age():
    batch = aged_batch()
    advantages = group_relative([s.reward for s in batch.samples], [s.group for s in batch.samples])
    found = batch_metrics(batch, advantages)
    assert [found[f"advantage_count_age_{age}"] for age in (0, 1, 3)] == [6, 3, 3]
    assert found["advantage_mean_age_1"] == pytest.approx(advantages.values[6:9].mean())
    assert found["advantage_std_age_3"] == pytest.approx(advantages.values[9:].std())
    assert "advantage_mean_age_2" not in found


@pytest.mark.parametrize("dead", [False, True])
def test_tokens_without_a_gradient_are_counted(dead):
    batch = random_batch()
    weights = np.full(len(batch.samples), 0.1)
    micro = micro_batch(batch.samples, range(len(batch.samples)), np.zeros(len(batch.samples)), weights)
    parameter = torch.ones(len(micro.targets), requires_grad=True)
    logprobs = parameter * micro.behaviour_logprobs
    mask = torch.ones(len(micro.targets))
    mask[: len(mask) // 2] = 0.0
    collector = TokenCollector()
    collector.watch(logprobs, micro.behaviour_logprobs)
    loss = (parameter if dead else logprobs * mask).sum()
    loss.backward()
    collector.add(micro, loss, logprobs, torch.zeros_like(mask), {"mask": mask})
    value, norm, tokens = collector.finish(torch.tensor(2.0))
    assert (value, norm) == (pytest.approx(float(loss.detach()), rel=1e-6), 2.0)
    assert tokens.gradients.tolist() == ([0.0] * len(mask) if dead else mask.tolist())
    assert not tokens.anchor_log_ratios.any()
    measured = token_metrics(tokens)
    assert measured["share_without_gradient"] == (1.0 if dead else (len(mask) // 2) / len(mask))
    assert measured["mask"] == pytest.approx(float(mask.mean()))


def documented() -> set[str]:
    """The names in the first column of the tables of `docs/metrics.md`."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_0-9N]+)`", row.split("|")[1])}


def general(name: str) -> str:
    """The documented form of a name: an age is `N`, and so is the number of a teacher."""
    return re.sub(r"^(teacher_\w+|.*_age)_\d+$", r"\1_N", name)


def test_every_measure_of_a_batch_is_documented():
    batch = aged_batch()
    advantages = group_relative([s.reward for s in batch.samples], [s.group for s in batch.samples])
    tokens = replace(in_order(batch, 0.1), gradients=np.zeros(3), anchor_log_ratios=np.zeros(3))
    scored = replace(tokens, discrepancies=tokens.log_ratios, is_scored=np.ones(len(tokens.log_ratios)))
    found = {
        **mismatch(batch, scored).metrics,
        **batch_metrics(batch, advantages),
        **token_metrics(tokens),
        **staleness_metrics(batch, tokens),
    }
    assert {general(name) for name in found} <= documented()


def test_every_name_on_the_line_of_an_update_is_documented():
    class Nowhere:
        def write(self, record):
            pass

    batch = random_batch()
    tally = Tally(rows=1, sink=Nowhere())
    tally.filtered([3, 4], 1.0)
    line = tally.trained(
        batch.samples, UpdateReport(0, {}, 0.0, 0, 1.0), started=0.0, ended=1.0, idle_s=0.0, waited_for=""
    )
    assert set(line) <= documented()


WHOLE = {"correction": CorrectionOptions(mode="filter", low=0.5)}
PARTS = {
    "discrepancy_correction": DiscrepancyOptions(mode="filter", low=0.5, level="turn"),
    "staleness_correction": StalenessOptions(mode="filter", low=0.5),
}
BESIDE = {
    "kl": KlOptions(coefficient=0.1),
    "entropy": EntropyOptions(coefficient=0.1),
    "supervised": SupervisedOptions(coefficient=0.1),
    "length": OverlongOptions(cache=4),
    "teachers": (TeacherOptions(path="a"), TeacherOptions(path="b", tasks=("other",))),
}


@pytest.mark.parametrize("corrections", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "custom"])
def test_every_measure_of_an_update_is_documented_whatever_the_objective(name, corrections):
    algorithm = OBJECTIVES[name](**BESIDE, **corrections)
    teachers = [tiny(kind="llama"), tiny()]
    trainer = LocalTrainer(tiny(), lora=LoraOptions(rank=2), algorithm=algorithm, teachers=teachers, max_tokens=20)
    own = trainer.weights(0)
    batch = replace(aged_batch(), versions={version: replace(own, version=version) for version in (0, 2)})
    trainer.restore({**trainer.state(), "version": torch.tensor(batch.update)})
    metrics = trainer.update(batch).metrics
    assert {general(each) for each in metrics} <= documented()
    assert {
        "staleness_kl_age_3",
        "mismatch_tokens",
        "weight_p99",
        "teacher_kl_0",
        "teacher_agreement",
    } <= metrics.keys()
    assert ("share_without_gradient" in metrics) == algorithm.uses_rewards
    assert {f"{table}_{what}" for table in corrections for what in ("weight", "outside")} <= metrics.keys()
    assert {"mismatch_kl_age_0", "mismatch_kl_age_1", "mismatch_kl_age_3"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_batch_without_signal_has_no_token_with_a_gradient():
    batch = random_batch()
    equal = Batch(0, [replace(sample, reward=0.5) for sample in batch.samples])
    metrics = LocalTrainer(tiny(), lora=LoraOptions(rank=2)).update(equal).metrics
    assert metrics["share_without_gradient"] == 1.0
    assert metrics["groups_without_signal"] == metrics["groups"]
