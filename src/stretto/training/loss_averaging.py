"""Averages token losses into the loss of an optimizer step, `sum(weight * loss)`. Pure.

The weights depend only on the whole mini-batch of the step, so the loss does not depend on how it is split into
micro-batches. The loss of a token comes from the objective (`stretto.objectives`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RecipeError
from stretto.objectives.base import Average, ObjectiveOptions
from stretto.training.trajectories import Trajectories


def token_weights(
    lengths: NDArray[np.int64],
    average: Average,
    average_tokens: int | None = None,
    trajectories: Trajectories | None = None,
) -> NDArray[np.float64]:
    """The weight of each token of a sample in the loss, by sample [n].

    `lengths` [n] are the tokens that are trained on. `token`: the mean over all of them. `sequence`: the mean over
    sequences of the mean over their tokens; a sequence without tokens counts as one. `constant`: the sum over tokens,
    divided by `average_tokens` times the sequences. A sequence is a trajectory, with all of its lineages; without
    `trajectories` each sample is one.
    """
    trajectories = trajectories or Trajectories.of_owners(np.arange(len(lengths)))
    count = max(1, len(trajectories))
    if average == "token":
        return np.full(len(lengths), 1.0 / max(1, int(lengths.sum())))
    if average == "sequence":
        whole = trajectories.lengths(lengths)[trajectories.owners]
        return np.where(lengths > 0, 1.0 / (np.maximum(whole, 1) * count), 0.0)
    if average_tokens is None:
        raise ValueError('`average = "constant"` needs `average_tokens`')
    return np.full(len(lengths), 1.0 / (average_tokens * count))


def with_divisor(algorithm: ObjectiveOptions, max_tokens: int) -> ObjectiveOptions:
    """Returns the objective with the divisor of `average = "constant"` filled in."""
    if algorithm.average != "constant" or algorithm.average_tokens is not None:
        return algorithm
    if max_tokens < 1:
        raise RecipeError(
            '`algorithm.average_tokens` is missing: `algorithm.average = "constant"` divides by it, and there is no '
            "`max_tokens` to take instead"
        )
    return algorithm.model_copy(update={"average_tokens": max_tokens})
