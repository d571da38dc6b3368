"""Log-probabilities of recorded samples under the policy that a trainer holds, by its own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.training.packing import micro_batch
from stretto.training.sequence_sizes import SequenceSizes
from stretto.training.trainer import LocalTrainer
from stretto.types import Sample, Weights

# The largest difference between engine and trainer that is rounding: of one token, plus a share of its log-probability;
# and on average over the tokens of a trajectory. `docs/performance/mismatch.md` has what was measured.
TOLERANCES = {
    torch.float64: (1e-6, 0.0, 1e-7),
    torch.float32: (1e-3, 0.0, 1e-4),
    torch.bfloat16: (0.5, 0.05, 0.1),
    torch.float16: (0.1, 0.01, 0.02),
}


def rescore_under(trainer: LocalTrainer, weights: Weights, samples: Sequence[Sample]) -> list[NDArray[np.float64]]:
    """Returns the log-probabilities of the sampled tokens of each sample, under recorded weights of any version."""
    with torch.inference_mode(False), trainer.policy.installed(weights):
        return rescore(trainer, samples)


def rescore(trainer: LocalTrainer, samples: Sequence[Sample]) -> list[NDArray[np.float64]]:
    """Returns the log-probabilities of the sampled tokens of each sample, under the trainer's policy."""
    packed, zeros = trainer.packed, np.zeros(len(samples))
    dtype = torch.float64 if packed.head.weight.dtype == torch.float64 else torch.float32
    found: dict[int, NDArray[np.float64]] = {}
    sizes = SequenceSizes.of(samples, shares_prompts=packed.shares_prompts)
    for chosen in sizes.bins(trainer.options.micro_batch_tokens):
        micro = micro_batch(
            samples, chosen, zeros, zeros,
            device=trainer.device, dtype=dtype, flash=packed.flash, multiple=packed.multiple,
            shares_prompts=packed.shares_prompts, routing=trainer.routing,
        )  # fmt: skip
        with torch.inference_mode(False):
            values = packed.scores(micro, trainer.temperature).double().cpu().numpy()
        found |= zip(chosen, np.split(values, np.cumsum(micro.num_targets)[:-1]), strict=True)
    return [found[index] for index in range(len(samples))]


def tolerance(dtype: torch.dtype, logprobs: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Returns the difference that rounding may make of each token [n], and on average."""
    token, share, mean = TOLERANCES[dtype]
    return token + share * np.abs(logprobs), mean
