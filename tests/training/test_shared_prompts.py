"""Updates with prompts that are computed once for all samples, against updates that repeat them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from training_cases import random_batch, tiny

from stretto.models.routing import routing_shape
from stretto.models.tiny import random_mixture
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.dora import DoraOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel
from stretto.training.mini_batches import split_batch
from stretto.training.packing import micro_batch
from stretto.training.sequence_sizes import SequenceSizes
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.training.version_scoring import version_passes
from stretto.types import Batch, Completion, Sample
from tests.training.test_trainer_objectives import gradients, relative_error

PROMPTS = (20, 40)  # tokens


def repeated() -> Any:
    """A context in which prompts are not shared."""
    return mock.patch.object(PackedModel, "shares_prompts", False)


def trainer_of(algorithm: ObjectiveOptions, steps: int = 1, micro_tokens: int = 150) -> LocalTrainer:
    made = LocalTrainer(
        tiny(dtype=torch.float64),
        lora=LoraOptions(rank=4),
        algorithm=algorithm,
        options=TrainingOptions(micro_tokens=micro_tokens, optimizer_steps=steps),
    )
    made.packed.prepare(compiled=False, checkpointing=False, plain=True)
    return made


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (GrpoOptions(), 1),
        (GrpoOptions(), 2),
        (GrpoOptions(kl={"coefficient": 0.1}), 1),
        (PpoOptions(), 2),
        (DoraOptions(average_tokens=40), 1),
    ],
    ids=["grpo", "two steps", "reference", "critic", "dora"],
)
def test_the_gradient_of_an_update_does_not_change(algorithm: ObjectiveOptions, steps: int) -> None:
    batch = random_batch(prompt_tokens=PROMPTS, longest=40)
    found = []
    for context in (mock.MagicMock(), repeated()):
        with context:
            trainer = trainer_of(algorithm, steps)
            assert trainer.shares_prompts == (not found)
            found.append(gradients(trainer, batch))
    # Norms are computed in float32 whatever the type, and gradients of a shared prompt are summed before them.
    assert relative_error(*found) < 1e-6
    assert any(float(each.abs().max()) > 0 for each in found[0].values())


def test_micro_batches_hold_more_samples_if_prompts_are_shared() -> None:
    batch = random_batch(prompt_tokens=PROMPTS, longest=10)
    shared = trainer_of(GrpoOptions()).update(batch).metrics["micro_batches"]
    with repeated():
        assert shared < trainer_of(GrpoOptions()).update(batch).metrics["micro_batches"]


def test_a_reference_that_repeats_prompts_keeps_micro_batches_small() -> None:
    trainer = trainer_of(GrpoOptions(kl={"coefficient": 0.1}))
    assert trainer.reference is not None
    assert trainer.shares_prompts
    trainer.reference.packed = mock.Mock(shares_prompts=False)
    assert not trainer.shares_prompts


@pytest.mark.parametrize("count", [2, 3, 20])
def test_ranks_divide_all_samples_and_keep_prompts_together(count: int) -> None:
    batch = random_batch(groups=6, prompt_tokens=PROMPTS)
    options = {"num_steps": 1, "micro_tokens": 200, "num_ranks": count, "shares_prompts": True}
    divided = [split_batch(batch.samples, GrpoOptions(), rank=rank, **options)[0] for rank in range(count)]
    assert all(each.shares == divided[0].shares for each in divided), "every rank finds the same"
    assert sorted(index for share in divided[0].shares for index in share) == list(range(24))
    for rank, mini_batch in enumerate(divided):
        own = sorted(index for plan in mini_batch.micro_batches for index in plan.samples)
        assert own == divided[0].shares[rank]
    groups = [{batch.samples[index].group for index in share} for share in divided[0].shares]
    if count < 20:
        assert sum(len(each) for each in groups) == 6, "no prompt is computed twice"
    else:
        assert sum(len(each) > 0 for each in groups) == 20, "six prompts would leave fourteen ranks without work"


def test_operations_count_a_shared_prompt_once() -> None:
    model = tiny()
    layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    tokens = np.arange(6, dtype=np.int32)
    prompt, completions = tuple(range(20)), (tokens[:4], tokens)
    samples = [
        Sample(n, 0, 0, prompt, Completion(n, 0, own, np.zeros(len(own), np.float32), "stop", ""), 0.0)
        for n, own in enumerate(completions)
    ]
    pairs = 19 * 19 / 2 + sum(19 * own + own * own / 2 for own in (4, 6))
    expected = 2 * (layers * (19 + 4 + 6) + 23 * 32 * 10) + 4 * pairs * 2 * 4 * 8
    assert Costs(model, trains_weights=False, shares_prompts=True).forward(Batch(0, samples)) == expected


def test_passes_under_older_versions_stay_within_the_budget() -> None:
    batch = random_batch(update=2, groups=8, version=0, prompt_tokens=PROMPTS, longest=30)
    shape = {"rank": 0, "micro_tokens": 150, "shares_prompts": True}
    (passes,) = version_passes(batch, range(32), [range(32)], **shape)
    assert sorted(index for own in passes.micro_batches for index in own) == list(range(32))
    sizes = SequenceSizes.of(batch.samples, shares_prompts=True)
    assert all(sizes[list(own)].total <= 150 for own in passes.micro_batches)
    assert len(passes.micro_batches) > 2
    assert version_passes(batch, [], [range(32)], **shape) == []


def test_recorded_experts_of_a_shared_prompt_are_replayed() -> None:
    draw = np.random.default_rng(0)
    prompt, samples = tuple(range(10, 40)), []
    prefix = np.argsort(draw.random((29, 2, 8)))[..., :2].astype(np.uint8)
    for number, length in enumerate((5, 9, 3, 7)):
        own = np.argsort(draw.random((length, 2, 8)))[..., :2].astype(np.uint8)
        record = np.concatenate([prefix if number != 2 else prefix[::-1], own])  # the third shares nothing
        made = Completion(
            number, 0, draw.integers(3, 99, length).astype(np.int32), np.zeros(length, np.float32), "stop", "",
            routing=record,
        )  # fmt: skip
        samples.append(Sample(number, 0, 0, prompt, made, 0.0))
    found = []
    for shares in (True, False):
        model = random_mixture(1)
        packed = PackedModel(model)
        packed.prepare(compiled=False, checkpointing=False, plain=True)
        zeros = np.zeros(4)
        micro = micro_batch(
            samples, [3, 0, 2, 1], zeros, zeros, flash=True, multiple=8, shares_prompts=shares,
            routing=routing_shape(model),
        )  # fmt: skip
        logprobs, _ = packed.logprobs(micro, 1.0)
        logprobs.sum().backward()
        found.append((logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}, len(micro.input_ids)))
    assert found[0][2] < found[1][2]
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    for name, gradient in found[1][1].items():
        assert (found[0][1][name] - gradient).abs().max() < 1e-4 * gradient.abs().max(), name
