"""Tokens that an objective does not train on: their loss and gradient are nothing, and the averages are of the rest."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import random_batch, reference_logprobs, tiny

from stretto.errors import RecipeError
from stretto.objectives.dora import DoraOptions
from stretto.objectives.dr_grpo import DrGrpoOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.naive import NaiveOptions
from stretto.training.mini_batches import trained_lengths, trained_tokens
from stretto.training.trainer import LocalTrainer, TrainingOptions
from stretto.types import Batch
from tests.training.test_trainer_objectives import gradients, relative_error


def make(algorithm, *, micro_tokens=40, version=0, **others):
    trainer = LocalTrainer(
        tiny(dtype=torch.float64), algorithm=algorithm, options=TrainingOptions(micro_tokens=micro_tokens), **others
    )
    trainer.restore({**trainer.state(), "version": torch.tensor(version)})
    return trainer


def plain_gradients(batch, factors):
    """The gradient of `sum(factor * log pi)`, with the factors of each sample's tokens, by the stock model."""
    model = tiny(dtype=torch.float64)
    for sample, own in zip(batch.samples, factors, strict=True):
        torch.dot(reference_logprobs(model, sample), torch.as_tensor(np.asarray(own, dtype=np.float64))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut_at(batch, cut):
    """The batch with these samples cut at `max_tokens`, and no others."""
    return dataclasses.replace(
        batch,
        samples=[
            dataclasses.replace(
                s, completion=dataclasses.replace(s.completion, finish="length" if i in cut else "stop")
            )
            for i, s in enumerate(batch.samples)
        ],
    )


REWARDS = [1.0, 0.0, 0.0, 3.0, 2.0, 1.0]
ADVANTAGES = [2 / 3, -1 / 3, -1 / 3, 1.0, 0.0, -1.0]  # against the mean of all three of a group, cut ones too


def six(cut=()):
    batch = random_batch(groups=2, members=3, longest=9)
    rewarded = [dataclasses.replace(s, reward=r) for s, r in zip(batch.samples, REWARDS, strict=True)]
    return cut_at(dataclasses.replace(batch, samples=rewarded), cut)


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_truncated_completions_are_not_trained_on_and_count_in_advantages(average):
    cut = {0, 4}
    batch = six(cut)
    lengths = [len(s.completion.tokens) for s in batch.samples]
    kept = sum(length for i, length in enumerate(lengths) if i not in cut)
    shares = {
        "token": [1 / kept] * 6,
        "sequence": [1 / (6 * length) for length in lengths],
        "constant": [1 / (6 * 7)] * 6,
    }[average]
    factors = [np.full(length, 0.0 if i in cut else -ADVANTAGES[i] * shares[i]) for i, length in enumerate(lengths)]
    divisor = {"average_tokens": 7} if average == "constant" else {}
    algorithm = NaiveOptions(advantage="group-mean", mask_truncated=True, average=average, **divisor)
    assert relative_error(gradients(make(algorithm), batch), plain_gradients(batch, factors)) < 1e-9
    metrics = make(algorithm).update(batch).metrics
    assert metrics["truncated"] == pytest.approx(2 / 6)
    assert metrics["tokens"] == sum(lengths)
    without = make(algorithm.model_copy(update={"mask_truncated": False}))
    assert relative_error(gradients(without, batch), plain_gradients(batch, factors)) > 1e-3


def test_a_batch_of_truncated_completions_alone_changes_nothing():
    trainer = make(NaiveOptions(mask_truncated=True, advantage="group-mean"))
    before = trainer.weights(0).checksum
    metrics = trainer.update(six(range(6))).metrics
    assert (metrics["loss"], metrics["grad_norm"], metrics["share_without_gradient"]) == (0.0, 0.0, 1.0)
    assert trainer.weights(1).checksum == before


def test_a_good_answer_that_is_masked_is_not_imitated():
    batch = six({3})
    algorithm = NaiveOptions(
        advantage="group-mean", mask_truncated=True, supervised={"coefficient": 0.5, "threshold": 1.5}
    )
    lengths = [len(s.completion.tokens) for s in batch.samples]
    kept = sum(lengths) - lengths[3]
    factors = [np.full(n, -a / kept) for n, a in zip(lengths, ADVANTAGES, strict=True)]
    factors[3][:] = 0.0
    factors[4] -= 0.5 / lengths[4]  # the only other one with a reward above 1.5
    assert relative_error(gradients(make(algorithm), batch), plain_gradients(batch, factors)) < 1e-9


def with_versions(sample, versions):
    return dataclasses.replace(
        sample,
        version=min(versions),
        completion=dataclasses.replace(sample.completion, token_versions=np.array(versions, dtype=np.int32)),
    )


def test_of_a_continued_trajectory_only_the_tokens_of_its_newest_version_are_trained_on():
    """Its own newest, which may be older than the trainer's; a trajectory of one version is trained on as a whole."""
    batch = random_batch(update=5, version=3, groups=2, members=3, longest=9)
    samples = [dataclasses.replace(s, reward=r) for s, r in zip(batch.samples, REWARDS, strict=True)]
    lengths = [len(s.completion.tokens) for s in samples]
    versions = {i: [5 if j % 2 == 0 else 4 - i % 2 for j in range(lengths[i])] for i in (0, 2)}
    versions[3] = [3] + [4] * (lengths[3] - 1)
    versions[5] = [2] * lengths[5]
    samples = [with_versions(s, versions[i]) if i in versions else s for i, s in enumerate(samples)]
    batch = Batch(5, samples)
    masks = [np.array([v == max(versions[i]) for v in versions[i]]) if i in versions else None for i in range(6)]
    algorithm = NaiveOptions(advantage="group-mean", mask_older_tokens=True)
    for sample, mask in zip(samples, masks, strict=True):
        found = trained_tokens(sample, algorithm)
        assert (found is None) if mask is None else found.tolist() == mask.tolist()
        assert trained_tokens(sample, NaiveOptions()) is None
    whole = [np.ones(n, dtype=bool) if mask is None else mask for n, mask in zip(lengths, masks, strict=True)]
    kept = sum(mask.sum() for mask in whole)
    assert trained_lengths(samples, algorithm).sum() == kept < sum(lengths)
    factors = [-a * mask / kept for a, mask in zip(ADVANTAGES, whole, strict=True)]
    got = gradients(make(algorithm, version=5), batch)
    assert relative_error(got, plain_gradients(batch, factors)) < 1e-9
    both = algorithm.model_copy(update={"mask_truncated": True})
    assert trained_lengths(cut_at(batch, {2}).samples, both)[2] == 0


def test_tokens_that_are_observed_between_turns_have_no_version_to_be_masked_by():
    (sample, *_) = random_batch(groups=1, members=1, longest=9, seed=3).samples
    assert len(sample.completion.tokens) >= 6
    count = len(sample.completion.tokens)
    turns = np.array([[0, 2], [4, count]], dtype=np.int32)
    continued = with_versions(sample, [1, 1, 1, 1, 1] + [2] * (count - 5))
    continued = dataclasses.replace(continued, completion=dataclasses.replace(continued.completion, turns=turns))
    found = trained_tokens(continued, NaiveOptions(mask_older_tokens=True))
    assert found.tolist() == [False, False, False] + [True] * (count - 5)


# -- normalized by version ---------------------------------------------------------------------------------------------


def mixed():
    """Two groups of three, whose members are of the versions 0, 1, 1 and 0, 0, 1."""
    samples = six().samples
    versions = [0, 1, 1, 0, 0, 1]
    return Batch(1, [dataclasses.replace(s, version=v) for s, v in zip(samples, versions, strict=True)])


def test_rewards_are_whitened_over_the_samples_of_one_version():
    batch = mixed()
    # Version 0 has the rewards 1, 3, 2: mean 2, deviation sqrt(2/3). Version 1 has 0, 0, 1: mean 1/3, sqrt(2)/3.
    old, new = np.sqrt(2 / 3), np.sqrt(2) / 3
    expected = [-1 / old, -1 / 3 / new, -1 / 3 / new, 1 / old, 0.0, 2 / 3 / new]
    lengths = [len(s.completion.tokens) for s in batch.samples]
    factors = [np.full(n, -a / sum(lengths)) for n, a in zip(lengths, expected, strict=True)]
    algorithm = NaiveOptions(advantage="whiten", whiten_over="version")
    got = gradients(make(algorithm, version=1), batch)
    assert relative_error(got, plain_gradients(batch, factors)) < 1e-5  # an epsilon is beside the deviation
    metrics = make(algorithm, version=1).update(batch).metrics
    assert metrics["advantage_mean_age_0"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["advantage_mean_age_1"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["advantage_std_age_0"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["advantage_std_age_1"] == pytest.approx(1.0, rel=1e-5)
    over_all = make(NaiveOptions(advantage="whiten"), version=1).update(batch).metrics
    assert abs(over_all["advantage_mean_age_1"]) > 0.1


def test_a_group_of_several_versions_is_counted_once():
    algorithm, batch = NaiveOptions(advantage="whiten", whiten_over="version"), mixed()
    metrics = make(algorithm, version=1).update(batch).metrics
    assert (metrics["groups"], metrics["groups_without_signal"]) == (2, 0)
    # Without a signal in version 0, both groups have that of version 1.
    equal = [dataclasses.replace(s, reward=1.0 if s.version == 0 else s.reward) for s in batch.samples]
    metrics = make(algorithm, version=1).update(Batch(1, equal)).metrics
    assert (metrics["groups"], metrics["groups_without_signal"]) == (2, 0)
    metrics = make(algorithm, version=1).update(Batch(1, equal[:5])).metrics
    assert (metrics["groups"], metrics["groups_without_signal"]) == (2, 2)
    one = [dataclasses.replace(equal[1], reward=5.0), equal[0], *equal[2:5]]  # of group 0
    metrics = make(algorithm, version=1).update(Batch(1, one)).metrics
    assert (metrics["groups"], metrics["groups_without_signal"]) == (2, 1)


@pytest.mark.parametrize("advantage", ["group", "group-mean", "leave-one-out"])
def test_advantages_that_are_not_whitened_are_of_whole_groups(advantage):
    batch = mixed()
    found = [
        make(GrpoOptions(advantage=advantage, whiten_over=over), version=1).update(batch).metrics
        for over in ("batch", "version")
    ]
    assert found[0]["loss"] == found[1]["loss"]
    assert found[0]["groups"] == found[1]["groups"] == 2


# -- the divisor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [DoraOptions(), DrGrpoOptions(), GrpoOptions(average="constant")])
def test_a_constant_average_divides_by_the_longest_completion_of_the_run_unless_told(algorithm):
    batch = six()
    told = algorithm.model_copy(update={"average_tokens": 11})
    expected = make(told).update(batch).metrics
    assert make(algorithm, max_tokens=11).update(batch).metrics["loss"] == expected["loss"]
    assert make(told, max_tokens=77).update(batch).metrics["loss"] == expected["loss"]
    twice = make(algorithm, max_tokens=22).update(batch).metrics
    assert twice["grad_norm"] == pytest.approx(expected["grad_norm"] / 2)
    with pytest.raises(RecipeError, match=r"`algorithm\.average_tokens` is missing"):
        make(algorithm)
