"""Samples of several versions of one policy, with the weights that sampled them, for tests of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from objective_cases import Data
from objective_reference import reference
from torch.func import functional_call
from training_cases import random_batch, reference_logprobs, tiny

from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.training.advantages import outcome_advantages
from stretto.training.loss_averaging import token_weights
from stretto.training.packing import micro_batch
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Sample, Weights

UPDATES = 3  # of a history: its batch has data of age 0 to 3
MAX_TOKENS = 20


def make(
    algorithm: ObjectiveOptions, *, dtype: torch.dtype = torch.float64, lora: bool = True, **options: Any
) -> LocalTrainer:
    return LocalTrainer(
        tiny(dtype=dtype),
        lora=LoraOptions(rank=2) if lora else None,
        options=TrainingOptions(**{"learning_rate": 3e-2, **options}),
        algorithm=algorithm,
        max_tokens=MAX_TOKENS,
    )


def recorded(trainer: LocalTrainer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the trainer itself gives them now."""
    zeros = np.zeros(len(samples))
    dtype = torch.float64 if trainer.packed.head.weight.dtype == torch.float64 else torch.float32
    micro = micro_batch(samples, range(len(samples)), zeros, zeros, dtype=dtype)
    with torch.no_grad():
        logprobs, _ = trainer.packed.logprobs(micro, trainer.temperature)
    parts = np.split(logprobs.numpy(), np.cumsum(micro.num_targets)[:-1])
    return [with_logprobs(sample, part) for sample, part in zip(samples, parts, strict=True)]


def with_logprobs(sample: Sample, sampled: np.ndarray) -> Sample:
    """The sample with other log-probabilities of its sampled tokens, in the precision that they have."""
    logprobs = np.zeros(len(sample.completion.tokens), dtype=sampled.dtype)
    logprobs[sample.completion.sampled] = sampled
    return replace(sample, completion=replace(sample.completion, logprobs=logprobs))


def samples_of(version: int, groups: int = 2, members: int = 2) -> list[Sample]:
    """Samples of a version, in groups of its own."""
    found = []
    for sample in random_batch(version, groups=groups, members=members, seed=50 + version, longest=12).samples:
        number = 100 * version + sample.trajectory
        completion = replace(sample.completion, id=number)
        found.append(replace(sample, trajectory=number, group=10 * version + sample.group, completion=completion))
    return found


def history(trainer: LocalTrainer, updates: int = UPDATES, members: int = 2) -> Batch:
    """Trains, and returns a batch for the next update: what each version so far has sampled, with its weights.

    The log-probabilities are those that the trainer gave the tokens when it held the version.
    """
    samples: list[Sample] = []
    versions: dict[int, Weights] = {}
    for version in range(updates):
        samples += recorded(trainer, samples_of(version, members=members))
        versions[version] = trainer.weights(version)
        trainer.update(Batch(version, recorded(trainer, random_batch(version, seed=version).samples)))
    return Batch(updates, [*samples, *recorded(trainer, samples_of(updates, members=members))], versions)


@functools.cache
def _past(dtype: torch.dtype, lora: bool, updates: int) -> tuple[dict[str, torch.Tensor], Batch]:
    trainer = make(GrpoOptions(), dtype=dtype, lora=lora)
    batch = history(trainer, updates)
    return trainer.state(), batch


def aged(
    algorithm: ObjectiveOptions,
    *,
    dtype: torch.dtype = torch.float64,
    lora: bool = True,
    updates: int = UPDATES,
    **options: Any,
) -> tuple[LocalTrainer, Batch]:
    """A trainer that has made updates, and a batch for its next one; the same for every algorithm."""
    state, batch = _past(dtype, lora, updates)
    trainer = make(algorithm, dtype=dtype, lora=lora, **options)
    trainer.restore(state)
    return trainer, batch


# -- what the stock model says -----------------------------------------------------------------------------------------


def stock_policy(weights: Weights, dtype: torch.dtype) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """A policy by the stock model alone, with adapters added to their matrices; and its weights, with gradients."""
    model = tiny(dtype=dtype).requires_grad_(False)
    leaves = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in weights.tensors.items()}
    base = dict(model.named_parameters())

    def call(**inputs: Any) -> Any:
        if weights.kind == "full":
            return functional_call(model, leaves, (), inputs)
        merged = {}
        for name in leaves:
            if name.endswith(".lora_A"):
                module = name.removesuffix(".lora_A")
                product = leaves[f"{module}.lora_B"] @ leaves[name]
                merged[f"{module}.weight"] = base[f"{module}.weight"] + weights.scale * product
        return functional_call(model, merged, (), inputs)

    return call, leaves


def stock_logprobs(weights: Weights, sample: Sample, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The log-probabilities of a sample's sampled tokens."""
    policy, _ = stock_policy(weights, dtype)
    with torch.no_grad():
        return reference_logprobs(policy, sample).numpy()[sample.completion.sampled]


def stock_sampled(batch: Batch, current: Weights) -> list[np.ndarray]:
    """The same for every token under the version that sampled it, by sample; `current` is the newest."""
    held = {**batch.versions, batch.update: current}
    found = []
    for sample in batch.samples:
        versions = sample.token_versions
        scores = {version: stock_logprobs(held[version], sample) for version in set(versions.tolist())}
        found.append(np.array([scores[version][place] for place, version in enumerate(versions.tolist())]))
    return found


def stock_gradients(
    options: ObjectiveOptions, batch: Batch, current: Weights
) -> tuple[float, dict[str, torch.Tensor], Data]:
    """Loss and gradient of the first step of an update, by the stock model and the plain formulas in float64."""
    samples = batch.samples
    policy, leaves = stock_policy(current, torch.float64)
    logprobs = torch.cat([reference_logprobs(policy, s)[s.completion.sampled] for s in samples])
    lengths = [s.completion.num_sampled for s in samples]
    rewards = [s.reward for s in samples]
    advantages = outcome_advantages(options.advantage, rewards, [s.group for s in samples]).values
    now = logprobs.detach().numpy()
    data = Data(
        current=now,
        behaviour=np.concatenate([s.completion.logprobs[s.completion.sampled] for s in samples]).astype(np.float64),
        proximal=now,
        sampled=np.concatenate(stock_sampled(batch, current)),
        advantages=np.repeat(advantages, lengths),
        rewards=np.repeat(rewards, lengths),
        lengths=lengths,
    )
    divisor = options.average_tokens or MAX_TOKENS
    shares = token_weights(np.array(lengths), options.average, divisor)[data.owner]
    losses, slopes = reference(options, data, shares)
    logprobs.backward(torch.tensor(slopes))
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return float(np.dot(losses, shares)), gradients, data
