"""What is added to an objective, whichever it is: divergence from a reference, entropy, likelihood of good answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import MAX_LOG_RATIO, ratio
from stretto.types import Batch

if TYPE_CHECKING:
    from stretto.training.parts import Piece

MAX_DIVERGENCE_WEIGHT = 2.0  # of a stale token in the divergence; as the correction weight's, by default


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of the divergence `KL(pi || reference)` at each sampled token [C], with gradient.

    With `d = logprobs - reference`: `k1` is `d`, `k2` is `d^2 / 2`, `k3` is `exp(-d) - 1 + d`. Over tokens sampled from
    `pi` itself, the mean of `k1` and of `k3` is the divergence; that of `k2` is near it where the two are near. The
    mean of their gradients is another matter: `k1` gives 0, `k2` the gradient of `KL(pi || reference)`, and `k3` that
    of `KL(reference || pi)`.
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


def weighted_divergence(
    estimator: str, logprobs: torch.Tensor, reference: torch.Tensor, behaviour: torch.Tensor
) -> torch.Tensor:
    """`sg(min(pi / mu, 2))` times `divergence` at each token [C]: what it would be had `pi` sampled the tokens.

    They were sampled by `mu`, `behaviour`; without the weight the means that `divergence` speaks of are over the wrong
    policy. Beyond the cap a token counts for less than it should. The states are still those that `mu` came to.
    """
    weights = ratio(logprobs, behaviour).detach().clamp(max=MAX_DIVERGENCE_WEIGHT)
    return weights * divergence(estimator, logprobs, reference)


def sampled_divergences(batch: Batch, pieces: Iterable[Piece], estimator: str) -> NDArray[np.float64]:
    """How far from the reference the policy that sampled each sample was, summed over its tokens [n]."""
    sums = np.zeros(len(batch.samples))
    for piece in pieces:
        assert piece.reference is not None
        completions = [batch.samples[index].completion for index in piece.chosen]
        logprobs = [each.logprobs if each.turns is None else each.logprobs[each.sampled] for each in completions]
        sampled = torch.from_numpy(np.concatenate(logprobs).astype(np.float64))
        values = divergence(estimator, sampled, piece.reference.double().cpu()).numpy()
        ends = np.cumsum([len(each) for each in logprobs])[:-1]
        for index, tokens in zip(piece.chosen, np.split(values, ends), strict=True):
            sums[index] = tokens.sum()
    return sums


def imitated_weights(rewards: NDArray[np.float64], lengths: NDArray[np.int64], threshold: float) -> NDArray[np.float64]:
    """The weight of each token of a sequence in the likelihood term [n]: the mean over all tokens of those imitated.

    Imitated are sequences with a reward above `threshold`; where there are none, every weight is 0.
    """
    chosen = rewards > threshold
    return np.where(chosen, 1.0 / max(1, int(lengths[chosen].sum())), 0.0)
