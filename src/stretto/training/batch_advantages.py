"""The advantages of a batch: from its rewards, shaped by length and reduced by penalties, and checked to be trainable.

`advantages.py` has the estimators by name. A critic has its own (`critic.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.environments.reward_range import MAX_REWARD, is_trainable
from stretto.errors import TrainerError
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.length_options import OverlongOptions
from stretto.training.advantages import LARGEST, Advantages, join_advantages, outcome_advantages, penalized_advantages
from stretto.training.mini_batches import trained_lengths
from stretto.training.packing import sampled_lengths
from stretto.training.reward_shaping import ShapedRewards, shape_rewards
from stretto.training.taught_samples import taught_by
from stretto.training.trajectories import Trajectories
from stretto.training.turn_credit import batch_turn_advantages
from stretto.types import Batch, Sample

Reals = NDArray[np.float64]


def shaped_rewards(batch: Batch, algorithm: ObjectiveOptions, *, max_tokens: int) -> ShapedRewards:
    """Returns the rewards of the samples, shaped by the lengths of their trajectories.

    The limit of tokens is that of a lineage, so the overlong penalty counts the longest one. Otherwise the length of a
    trajectory is that of its lineages together.
    """
    trajectories, lengths = Trajectories.of(batch.samples), sampled_lengths(batch.samples)
    by_longest = isinstance(algorithm.length, OverlongOptions)
    found = shape_rewards(
        np.array([s.reward for s in batch.samples])[trajectories.first],
        np.array([s.group for s in batch.samples])[trajectories.first],
        trajectories.longest(lengths) if by_longest else trajectories.lengths(lengths),
        algorithm.length,
        max_tokens=max_tokens,
    )
    return replace(found, rewards=found.rewards[trajectories.owners])


def batch_advantages(batch: Batch, algorithm: ObjectiveOptions, rewards: Reals, penalties: Reals) -> Advantages:
    """Returns the advantages of a batch without a critic. Raises `ValueError` if the numbers do not fit.

    `rewards` and `penalties` [n] are those of the trajectory of each sample.
    """
    if algorithm.advantage != "whiten" or algorithm.whiten_over == "batch":
        return _compared(batch, algorithm, rewards, penalties)
    versions = np.array([s.version for s in batch.samples])
    parts = []
    for version in np.unique(versions).tolist():
        chosen = np.flatnonzero(versions == version)
        part = replace(batch, samples=[batch.samples[index] for index in chosen.tolist()])
        parts.append((chosen, _compared(part, algorithm, rewards[chosen], penalties[chosen])))
    return join_advantages(parts, sampled_lengths(batch.samples), [s.group for s in batch.samples])


def _compared(batch: Batch, algorithm: ObjectiveOptions, rewards: Reals, penalties: Reals) -> Advantages:
    """The advantages of samples that are compared with each other: a trajectory once, whatever its lineages.

    Groups without signal are counted by the environment's own rewards, because shaping makes any two samples differ.
    """
    name = algorithm.advantage
    if (turns := algorithm.turns) is not None:
        return batch_turn_advantages(name, batch, rewards, penalties, gamma=turns.gamma)
    trajectories = Trajectories.of(batch.samples)
    once = [batch.samples[index] for index in trajectories.first.tolist()]
    groups = [s.group for s in once]
    found = penalized_advantages(name, rewards[trajectories.first], penalties[trajectories.first], groups)
    plain = outcome_advantages(name, [s.reward for s in once], groups)
    return replace(found, values=found.values[trajectories.owners], num_without_signal=plain.num_without_signal)


def without_gradient(batch: Batch, algorithm: ObjectiveOptions, advantages: Advantages) -> NDArray[np.bool_]:
    """Returns a mask of the samples that cannot change the policy [n], so that they need not be computed.

    The gradient of their loss is exactly zero: none of their tokens is trained, or all advantages are 0 in an objective
    that is proportional to them. A group whose rewards are equal is of the second kind, unless a teacher teaches it. A
    divergence needs every sample.
    """
    if algorithm.kl is not None:
        return np.zeros(len(batch.samples), dtype=np.bool_)
    masked: NDArray[np.bool_] = trained_lengths(batch.samples, algorithm) == 0
    if not algorithm.zero_without_advantage or algorithm.entropy is not None or algorithm.supervised is not None:
        return masked
    equal: NDArray[np.bool_] = largest_by_sample(batch, advantages) == 0.0
    if not algorithm.uses_rewards:
        equal = np.ones_like(equal)
    found: NDArray[np.bool_] = masked | (equal & (taught_by(batch.samples, algorithm.teachers) < 0))
    for sample in (batch.samples[index] for index in np.flatnonzero(found).tolist()):
        if not np.isfinite(sample.completion.logprobs).all():
            raise TrainerError(untrainable(batch, sample, "a log-probability of the engine is not finite"))
    return found


def refuse_large_rewards(batch: Batch, rewards: Reals) -> None:
    """Raises `TrainerError` for a sample whose reward, after shaping and penalties, is too large to compute with."""
    for sample, reward in zip(batch.samples, rewards.tolist(), strict=True):
        if not all(abs(each) <= LARGEST for each in (sample.reward, reward, *sample.rewards_by_turn)):
            raise TrainerError(untrainable(batch, sample, f"its reward is {reward:g} after shaping and penalties"))


def refuse_overflow(batch: Batch, advantages: Advantages, dtype: torch.dtype) -> None:
    """Raises `TrainerError` for a sample whose advantage is not finite in the type that the loss is computed in."""
    largest = torch.finfo(dtype).max
    for sample, advantage in zip(batch.samples, largest_by_sample(batch, advantages).tolist(), strict=True):
        if not advantage <= largest:
            name = str(dtype).removeprefix("torch.")
            why = f"its advantage is {advantage:g}, and {name} ends at {largest:.2g}"
            raise TrainerError(untrainable(batch, sample, why))


def largest_by_sample(batch: Batch, advantages: Advantages) -> Reals:
    """Returns the largest magnitude of the advantages of each sample [n]."""
    found = np.abs(advantages.values)
    if advantages.tokens is not None:
        owner = np.repeat(np.arange(len(found)), sampled_lengths(batch.samples))
        np.maximum.at(found, owner, np.abs(advantages.tokens))
    return found


def untrainable(batch: Batch, sample: Sample, why: str) -> str:
    """Names a sample that an update cannot be trained on, the reason, and the way on."""
    named = f"trajectory {sample.trajectory} with the reward {sample.reward:g}"
    said = f"update {batch.update} cannot be trained on {named}"
    if all(is_trainable(reward) for reward in (sample.reward, *sample.rewards_by_turn)):
        return f"{said}: {why}; `--resume --give-up {sample.trajectory}` goes on without it"
    return f"{said}: {why}; with `--resume`, rewards beyond {MAX_REWARD:g} are scored again"
