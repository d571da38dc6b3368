"""Terms that can be added to any objective: divergence from a reference, and the likelihood of good answers.

The entropy bonus needs no function of its own: entropies come with the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import MAX_LOG_RATIO, ratio
from stretto.objectives.regularizer_options import KlOptions
from stretto.training.trajectories import Trajectories
from stretto.types import Batch

if TYPE_CHECKING:
    from stretto.training.mini_batches import MicroBatchPlan

MAX_DIVERGENCE_WEIGHT = 2.0  # of a stale token in the divergence; the default cap of the correction weight


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimates `KL(pi || reference)` at each sampled token [C], with gradient.

    With `d = logprobs - reference`: `k1` is `d`, `k2` is `d^2 / 2`, `k3` is `exp(-d) - 1 + d`. Over tokens sampled from
    `pi`, the means of `k1` and `k3` are the divergence, and the mean of `k2` is close to it if the policies are close.
    The means of their gradients differ: `k1` gives 0, `k2` the gradient of `KL(pi || reference)`, and `k3` that of
    `KL(reference || pi)`.
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
    """`sg(min(pi / mu, 2))` times `divergence` at each token [C]: the divergence as if `pi` had sampled the tokens.

    The behaviour policy `mu` sampled them, so without the weight the means in `divergence` would be over the wrong
    policy. A token beyond the cap counts for less than it should. The states are still those that `mu` reached.
    """
    weights = ratio(logprobs, behaviour).detach().clamp(max=MAX_DIVERGENCE_WEIGHT)
    return weights * divergence(estimator, logprobs, reference)


def sampled_divergences(batch: Batch, plans: Iterable[MicroBatchPlan], estimator: str) -> NDArray[np.float64]:
    """The divergence of the behaviour policy from the reference, summed over the tokens of each sample [n]."""
    sums = np.zeros(len(batch.samples))
    for plan in plans:
        assert plan.reference is not None
        completions = [batch.samples[index].completion for index in plan.samples]
        logprobs = [each.logprobs if each.turns is None else each.logprobs[each.sampled] for each in completions]
        sampled = torch.from_numpy(np.concatenate(logprobs).astype(np.float64))
        values = divergence(estimator, sampled, plan.reference.double().cpu()).numpy()
        ends = np.cumsum([len(each) for each in logprobs])[:-1]
        for index, tokens in zip(plan.samples, np.split(values, ends), strict=True):
            sums[index] = tokens.sum()
    return sums


def reward_penalties(
    batch: Batch,
    plans: Iterable[MicroBatchPlan],
    kl: KlOptions | None,
    total: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """The divergence that is subtracted from the reward of each sample's trajectory [n]; zeros if it is not.

    `total` sums over the ranks.
    """
    if kl is None or kl.place != "reward":
        return np.zeros(len(batch.samples))
    trajectories = Trajectories.of(batch.samples)
    own = trajectories.summed(total(sampled_divergences(batch, plans, kl.estimate)))
    return kl.coefficient * own[trajectories.owners]


def imitation_weights(
    rewards: NDArray[np.float64], lengths: NDArray[np.int64], threshold: float
) -> NDArray[np.float64]:
    """The weight of each token of a sequence in the supervised term [n]: a mean over all imitated tokens.

    Sequences with a reward above `threshold` are imitated. If there are none, every weight is 0.
    """
    chosen = rewards > threshold
    return np.where(chosen, 1.0 / max(1, int(lengths[chosen].sum())), 0.0)
