"""What is added to an objective, whichever it is: divergence from a reference, entropy, likelihood of good answers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import MAX_LOG_RATIO


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of the divergence of the policy from the reference at each sampled token [C], with gradient.

    With `d = logprobs - reference`: `k1` is `d`, `k2` is `d^2 / 2`, `k3` is `exp(-d) - 1 + d`. Tokens sampled from the
    policy have the divergence as the mean of `k1` and of `k3`; the gradient of the divergence is the mean of that of
    `k2`.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    raise ValueError(f'`estimator = {estimator!r}` is unknown: choose "k1", "k2" or "k3"')


def imitated_weights(rewards: NDArray[np.float64], lengths: NDArray[np.int64], threshold: float) -> NDArray[np.float64]:
    """The weight of each token of a sequence in the likelihood term [n]: the mean over all tokens of those imitated.

    Imitated are sequences with a reward above `threshold`; where there are none, every weight is 0.
    """
    chosen = rewards > threshold
    return np.where(chosen, 1.0 / max(1, int(lengths[chosen].sum())), 0.0)
