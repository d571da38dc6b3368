"""What an update reports of each token is what it computed, and asking for it changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import random_batch, reference_logprobs, tiny

from stretto.models.checksums import checksum
from stretto.training.advantages import outcome_advantages
from stretto.training.trainer import LocalTrainer, TrainingOptions
from stretto.types import Batch


def asking(batch: Batch) -> Batch:
    return dataclasses.replace(batch, reports_tokens=True)


def test_every_sample_is_reported_once_with_the_trainers_values() -> None:
    batch = asking(random_batch())
    equal = [dataclasses.replace(s, reward=1.0) if s.group == 1 else s for s in batch.samples]
    batch = dataclasses.replace(batch, samples=equal)
    model = tiny(dtype=torch.float64)
    expected = [reference_logprobs(model, sample).detach().numpy() for sample in batch.samples]
    report = LocalTrainer(model, options=TrainingOptions(micro_tokens=50)).update(batch)
    advantages = outcome_advantages("group", [s.reward for s in batch.samples], [s.group for s in batch.samples])
    assert [each.position for each in report.tokens] == [0, 1, 2, 3, 8, 9, 10, 11], "no gradient, nothing computed"
    for each in report.tokens:
        sample = batch.samples[each.position]
        assert len(each.logprobs) == len(each.ratios) == len(each.gradients) == sample.completion.num_sampled
        np.testing.assert_allclose(each.logprobs, expected[each.position], rtol=1e-5)
        np.testing.assert_allclose(each.advantages, advantages.values[each.position], rtol=1e-6)
        ratios = np.exp(expected[each.position] - np.asarray(sample.completion.logprobs, dtype=np.float64))
        np.testing.assert_allclose(each.ratios, ratios, rtol=1e-4)
        assert np.isfinite(each.gradients).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_asking_for_the_values_changes_no_bit(steps: int) -> None:
    batch, sums = random_batch(seed=1), []
    for each in (batch, asking(batch)):
        trainer = LocalTrainer(tiny(), options=TrainingOptions(micro_tokens=60, optimizer_steps=steps))
        report = trainer.update(each)
        sums.append(checksum(trainer.weights(1).tensors))
        assert bool(report.tokens) == each.reports_tokens
    assert sums[0] == sums[1]
