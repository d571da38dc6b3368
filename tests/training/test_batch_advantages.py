"""Samples that cannot change the policy are not computed, and the gradient is what it was."""

import dataclasses

import numpy as np
import pytest
import torch
from objective_cases import CASES, options_of
from training_cases import UNSTEPPED, random_batch, tiny

from stretto.errors import TrainerError
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.kimi import KimiOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training import trainer as trainer_module
from stretto.training.advantages import outcome_advantages
from stretto.training.batch_advantages import without_gradient
from stretto.training.trainer import LocalTrainer, TrainingOptions
from stretto.types import Batch
from tests.training.test_trainer_objectives import gradients, relative_error

TOKENS = 6


def equal_in_group(batch: Batch, group: int) -> Batch:
    """The batch with one reward for all members of a group."""
    samples = [dataclasses.replace(s, reward=1.0) if s.group == group else s for s in batch.samples]
    return dataclasses.replace(batch, samples=samples)


def make(algorithm, *, steps=1):
    options = TrainingOptions(micro_tokens=60, optimizer_steps=steps, learning_rate=UNSTEPPED)
    return LocalTrainer(tiny(dtype=torch.float64), algorithm=algorithm, options=options)


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_an_objective_that_says_so_has_no_gradient_without_an_advantage(name, given):
    """For any log-probabilities and rewards. If an objective may have one, its samples are always computed."""
    from stretto.objectives.base import Tokens

    options = options_of(name, given)
    draw = torch.Generator().manual_seed(0)

    def some():
        return torch.randn(TOKENS, generator=draw, dtype=torch.float64)

    logprobs = (some() - 3).requires_grad_()
    tokens = Tokens(
        logprobs=logprobs, behaviour=some() - 3, proximal=some() - 3, sampled=some() - 3,
        advantages=torch.zeros(TOKENS, dtype=torch.float64), rewards=some(),
        sequences=torch.tensor([0, 0, 0, 1, 1, 1]), num_sequences=2, lengths=torch.tensor([3, 3]),
        turns=torch.tensor([0, 0, 1, 2, 2, 2]),
    )  # fmt: skip
    losses, _ = options.loss(tokens)
    if losses.requires_grad:
        losses.sum().backward()
    has_gradient = logprobs.grad is not None and bool((logprobs.grad != 0).any())
    assert not (options.zero_without_advantage and has_gradient)
    assert options.zero_without_advantage or name in ("kimi", "custom")


@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_is_that_of_all_samples(steps, monkeypatch):
    batch = equal_in_group(random_batch(), 1)
    skipping, whole = make(GrpoOptions(), steps=steps), make(GrpoOptions(), steps=steps)
    told = skipping.update(batch).metrics
    monkeypatch.setattr(trainer_module, "without_gradient", lambda batch, *_: np.zeros(len(batch.samples), bool))
    computed = whole.update(batch).metrics
    # With three steps, one has only samples without a gradient, and computes the shortest of them.
    assert told["skipped_sequences"] == (4 if steps == 1 else 3)
    assert computed["skipped_sequences"] == 0
    assert told["loss"] == pytest.approx(computed["loss"], rel=1e-12)
    assert told["grad_norm"] == pytest.approx(computed["grad_norm"], rel=1e-12)
    assert told["tokens"] == computed["tokens"]
    assert told["flops"] < computed["flops"]


def test_the_direction_is_that_of_all_samples_too(monkeypatch):
    batch = equal_in_group(random_batch(), 1)
    skipping = gradients(make(GrpoOptions()), batch)
    monkeypatch.setattr(trainer_module, "without_gradient", lambda batch, *_: np.zeros(len(batch.samples), bool))
    assert relative_error(skipping, gradients(make(GrpoOptions()), batch)) < 1e-12


def test_a_batch_without_any_signal_is_an_update_with_no_gradient():
    batch = random_batch()
    for group in range(3):
        batch = equal_in_group(batch, group)
    trainer = make(GrpoOptions())
    metrics = trainer.update(batch).metrics
    assert metrics["skipped_sequences"] == len(batch.samples) - 1
    assert metrics["grad_norm"] == 0.0
    assert trainer.version == 1


@pytest.mark.parametrize(
    "options",
    [
        KimiOptions(),
        PpoOptions(),
        GrpoOptions(kl={"coefficient": 0.1}),
        GrpoOptions(kl={"coefficient": 0.1, "place": "reward"}, mask_truncated=True),
        GrpoOptions(entropy={"coefficient": 0.1}),
        GrpoOptions(supervised={"coefficient": 0.1}),
    ],
    ids=lambda options: (
        f"{options.type}-{[name for name in ('kl', 'entropy', 'supervised') if getattr(options, name)]}"
    ),
)
def test_terms_that_need_no_advantage_keep_every_sample(options):
    batch = equal_in_group(random_batch(), 1)
    trainer = LocalTrainer(tiny(dtype=torch.float64), algorithm=options, reference=tiny(dtype=torch.float64))
    assert trainer.update(batch).metrics["skipped_sequences"] == 0


def test_masked_samples_are_skipped_whatever_the_terms():
    batch = random_batch()
    cut = [s.completion.finish == "length" for s in batch.samples]
    assert 0 < sum(cut) < len(cut)
    options = GrpoOptions(entropy={"coefficient": 0.1}, mask_truncated=True)
    advantages = outcome_advantages("group", [s.reward for s in batch.samples], [s.group for s in batch.samples])
    assert without_gradient(batch, options, advantages).tolist() == cut


def test_a_log_probability_that_is_not_finite_is_found_in_a_skipped_sample_too():
    batch = equal_in_group(random_batch(), 1)
    place = next(index for index, sample in enumerate(batch.samples) if sample.group == 1)
    batch.samples[place].completion.logprobs[0] = np.nan
    with pytest.raises(TrainerError, match="a log-probability of the engine is not finite"):
        make(GrpoOptions()).update(batch)


def test_an_update_from_before_samples_were_skipped_computes_them_all():
    batch = dataclasses.replace(equal_in_group(random_batch(), 1), skips=False)
    assert make(GrpoOptions()).update(batch).metrics["skipped_sequences"] == 0
