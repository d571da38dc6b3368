"""Why an update failed, as the user is told: which sample, which option, or training itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from stretto.errors import TrainerError
from stretto.models.float16_range import range_hint
from stretto.training.advantages import Advantages
from stretto.training.batch_advantages import largest_by_sample, untrainable
from stretto.training.update_metrics import TokenValues
from stretto.types import Batch

RATES = (("", "training.learning_rate"), (" of its critic", "algorithm.critic.learning_rate"))


def why_not_finite(batch: Batch, advantages: Advantages, tokens: TokenValues, dtype: torch.dtype) -> str:
    """Says which sample of a batch has a loss that is not finite, and what of it; or that all have.

    `dtype` is the type of the weights.
    """
    wrong, hint = ~np.isfinite(tokens.log_ratios), range_hint(dtype)
    if 1 < len(np.unique(tokens.samples)) == len(np.unique(tokens.samples[wrong])):
        return (
            f"no sample has finite log-probabilities under version {batch.update}: training has diverged. No "
            f"trajectory is the cause. Lower `training.learning_rate` and start a new run{hint}"
        )
    if wrong.any():
        sample = batch.samples[int(tokens.samples[np.argmax(wrong)])]
        why = "a log-probability, the engine's or the trainer's, is not finite"
        return untrainable(batch, sample, why) + hint
    largest = largest_by_sample(batch, advantages)
    sample = batch.samples[int(np.argmax(largest))]
    why = f"its advantage is {largest.max():g}, the largest of the batch, and all log-probabilities are finite"
    return untrainable(batch, sample, why)


def refuse_diverged(update: int, norms: Sequence[float]) -> None:
    """Raises `TrainerError` if the norm of the weights after a step, or then of the critic's, is not finite."""
    for norm, (part, option) in zip(norms, RATES, strict=False):
        if not math.isfinite(norm):
            raise TrainerError(
                f"update {update} makes weights{part} that are not finite, or too large to compute with: training has "
                f"diverged. No trajectory is the cause. Lower `{option}` and start a new run"
            )
