"""Objectives: what an update minimizes, a token at a time.

An algorithm is a frozen dataclass of its own options with three members, so the trainer knows none by name:

- `advantages(rewards, groups)` turns the rewards of a batch into one number a sample;
- `objective(logprobs, view)` turns the log-probabilities of a micro-batch into a loss a token, with diagnostics;
- `average` says how the losses of the tokens of the whole batch become one number.

The loss of an update is `sum(weight * loss)` with weights that depend on the whole batch only, so it does not depend on
how the batch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from stretto.errors import RecipeError
from stretto.objectives.base import MAX_LOG_RATIO, Average
from stretto.training.advantages import Advantages, group_relative


@dataclass(frozen=True, slots=True)
class BatchView:
    """What an objective may look at: the completion tokens of one micro-batch, flat, without padding. All are [C]."""

    behaviour_logprobs: torch.Tensor  # under the distribution that the engine sampled from
    advantages: torch.Tensor  # each token's sequence's
    sequences: torch.Tensor  # which sequence of the micro-batch a token belongs to, from 0, int64
    num_sequences: int  # in this micro-batch


Objective = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""The loss of each token [C], and values of each token [C] that are averaged over the batch under their names."""


class Algorithm(Protocol):
    """What the trainer needs of an algorithm."""

    @property
    def average(self) -> Average: ...

    def advantages(self, rewards: ArrayLike, groups: Sequence[int] | NDArray[np.int64]) -> Advantages: ...

    def objective(self, logprobs: torch.Tensor, view: BatchView) -> Objective: ...


def clipped_objective(logprobs: torch.Tensor, view: BatchView, *, clip_low: float, clip_high: float) -> Objective:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprob - behaviour logprob)`.

    The ratio is anchored on the policy that sampled the token, however old: there is no third policy in between.
    """
    ratio = (logprobs - view.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = -torch.minimum(ratio * view.advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * view.advantages)
    with torch.no_grad():
        diagnostics = {
            "clip_fraction_low": ((ratio < 1 - clip_low) & (view.advantages < 0)).to(loss.dtype),
            "clip_fraction_high": ((ratio > 1 + clip_high) & (view.advantages > 0)).to(loss.dtype),
        }
    return loss, diagnostics


@dataclass(frozen=True, slots=True)
class GrpoOptions:
    """Group-relative policy optimization, clipped against the behaviour policy."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_std: bool = True  # false: advantages are only centred, so hard and easy prompts weigh alike
    average: Average = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise RecipeError(f"`clip_low = {self.clip_low}` must be at least 0 and below 1")
        if self.clip_high < 0:
            raise RecipeError(f"`clip_high = {self.clip_high}` must not be negative")
        if self.average not in ("token", "sequence"):
            raise RecipeError(f'`average = {self.average!r}` is unknown: choose "token" or "sequence"')

    def advantages(self, rewards: ArrayLike, groups: Sequence[int] | NDArray[np.int64]) -> Advantages:
        return group_relative(rewards, groups, normalize_std=self.normalize_std)

    def objective(self, logprobs: torch.Tensor, view: BatchView) -> Objective:
        return clipped_objective(logprobs, view, clip_low=self.clip_low, clip_high=self.clip_high)


def token_weights(
    lengths: NDArray[np.int64], average: Average, average_tokens: int | None = None
) -> NDArray[np.float64]:
    """The weight that each token of a sequence has in the batch's loss, by sequence [n]; 0 for an empty completion.

    `token`: the mean over all completion tokens of the batch. `sequence`: over each sequence's tokens, then over
    sequences. `constant`: the sum over tokens, over `average_tokens` times the sequences.
    """
    count = max(1, len(lengths))
    if average == "token":
        return np.full(len(lengths), 1.0 / max(1, int(lengths.sum())))
    if average == "sequence":
        return np.where(lengths > 0, 1.0 / (np.maximum(lengths, 1) * count), 0.0)
    if average_tokens is None:
        raise ValueError('`average = "constant"` needs `average_tokens`')
    return np.full(len(lengths), 1.0 / (average_tokens * count))
