"""What is measured in an update. Values of each token stay on the device until the last micro-batch is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import MAX_LOG_RATIO
from stretto.training.advantages import Advantages
from stretto.training.packing import MicroBatch
from stretto.types import Batch

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of the completion tokens of a batch, in the order in which they were trained. All are [C]."""

    samples: NDArray[np.int64]  # which sample of the batch
    log_ratios: Values  # trainer minus engine
    entropies: Values
    diagnostics: Mapping[str, Values]


class Collector:
    """Collects the values of micro-batches, and hands them over in one transfer."""

    def __init__(self) -> None:
        self.num_micro_batches = 0
        self._names: tuple[str, ...] = ()
        self._rows: list[torch.Tensor] = []
        self._samples: list[NDArray[np.int64]] = []
        self._losses: list[torch.Tensor] = []

    def add(
        self,
        micro: MicroBatch,
        loss: torch.Tensor,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        diagnostics: Mapping[str, torch.Tensor],
    ) -> None:
        self.num_micro_batches += 1
        self._names = tuple(diagnostics)
        self._losses.append(loss.detach())
        log_ratios = logprobs.detach() - micro.behaviour_logprobs
        self._rows.append(torch.stack([log_ratios, entropies, *diagnostics.values()]))
        self._samples.append(np.repeat(np.asarray(micro.samples), micro.num_targets))

    def finish(self, norm: torch.Tensor) -> tuple[float, float, TokenValues]:
        """The loss of the batch, the value of `norm`, and the values of its tokens: one wait for the device."""
        rows = torch.cat(self._rows, dim=1).double()
        numbers = torch.stack([torch.stack(self._losses).double().sum(), norm.to(rows)])
        read = torch.cat([numbers, rows.reshape(-1)]).cpu().numpy()
        values = read[2:].reshape(rows.shape)
        diagnostics = dict(zip(self._names, values[2:], strict=True))
        return (
            float(read[0]),
            float(read[1]),
            TokenValues(np.concatenate(self._samples), values[0], values[1], diagnostics),
        )


def batch_measures(batch: Batch, advantages: Advantages) -> dict[str, float]:
    """What the batch is, before it is trained on."""
    rewards = np.array([s.reward for s in batch.samples])
    lengths = np.array([len(s.completion.tokens) for s in batch.samples])
    ages = batch.update - np.array([s.version for s in batch.samples])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_mean": float(advantages.values.mean()),
        "advantage_std": float(advantages.values.std()),
        "advantage_min": float(advantages.values.min()),
        "advantage_max": float(advantages.values.max()),
        "groups": float(advantages.num_groups),
        "groups_without_signal": float(advantages.num_without_signal),
        "tokens": float(lengths.sum()),
        "num_sequences": float(len(lengths)),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([s.completion.finish == "length" for s in batch.samples])),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
    }


def token_measures(tokens: TokenValues, num_samples: int) -> dict[str, float]:
    """How far the policy is from those that sampled the batch."""
    if len(tokens.log_ratios) == 0:
        return {}
    ratios = np.exp(np.clip(tokens.log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "ratio_mean": float(ratios.mean()),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
        **{name: float(values.mean()) for name, values in tokens.diagnostics.items()},
        "entropy": float(tokens.entropies.mean()),
        "effective_sample_size": effective_sample_size(
            np.bincount(tokens.samples, tokens.log_ratios, minlength=num_samples).astype(np.float64)
        ),
    }


def effective_sample_size(log_weights: Values) -> float:
    """`(sum w)^2 / (n sum w^2)` of importance weights, given as logarithms: 1 when all are equal, down to 1 / n."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def mismatch(batch: Batch, tokens: TokenValues) -> tuple[float, int]:
    """Engine against trainer at the same version: the sum over tokens of `exp(d) - 1 - d`, and their number.

    This is the estimate of the divergence that is never negative. Only tokens sampled from version `batch.update`
    count: the trainer holds exactly that version, so `d` is how differently the two compute, and nothing else.
    """
    current = np.array([s.version == batch.update for s in batch.samples])[tokens.samples]
    if any(s.completion.token_versions is not None for s in batch.samples):
        order = tokens.samples[np.flatnonzero(np.diff(tokens.samples, prepend=-1))].tolist()
        versions = [
            np.full(len(s.completion.tokens), s.version)
            if s.completion.token_versions is None
            else s.completion.token_versions
            for s in (batch.samples[index] for index in order)
        ]
        current = np.concatenate(versions) == batch.update
    differences = np.clip(tokens.log_ratios[current], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return float((np.expm1(differences) - differences).sum()), int(current.sum())
