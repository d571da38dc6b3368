"""Splits the batch of an update into mini-batches, one an optimizer step, and those into micro-batches.

A mini-batch has whole groups in the order of the batch, so the samples of a step do not depend on their lengths. Each
step minimizes the average over its own tokens, so the loss weights are those of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import ObjectiveOptions
from stretto.training.loss_averaging import token_weights
from stretto.training.parallel import shares
from stretto.training.regularizers import imitation_weights
from stretto.training.sequence_sizes import SequenceSizes
from stretto.training.trajectories import Trajectories
from stretto.types import Sample

if TYPE_CHECKING:
    from stretto.training.teachers import TeacherScores


@dataclass(slots=True)
class MicroBatchPlan:
    """The samples of one micro-batch, and what is computed of their completion tokens [C] before the first step."""

    samples: tuple[int, ...]  # indices into the batch
    proximal: torch.Tensor | None = None  # None: the update has one step, whose own log-probabilities are used
    sampled: torch.Tensor | None = None  # log-probabilities under the versions that sampled, where `is_scored`
    is_scored: torch.Tensor | None = None  # bool; None with `sampled`: no token is
    reference: torch.Tensor | None = None  # log-probabilities under the reference, if a divergence is measured
    teachers: tuple[TeacherScores, ...] = ()  # what teachers say of the tokens
    values: torch.Tensor | None = None  # the critic's values at the start of the update
    returns: torch.Tensor | None = None  # the targets of the critic's values


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimizer step. Weights are indexed by the samples of the whole batch."""

    micro_batches: list[MicroBatchPlan]  # of this rank
    num_micro_batches: int  # of all ranks together
    max_micro_batches: int  # of the rank with the most
    weights: NDArray[np.float64]  # [n], the loss weight of each token of a sample; 0 outside of the mini-batch
    imitation: NDArray[np.float64] | None  # [n], the weight of each token in `[algorithm.supervised]`
    shares: list[list[int]]  # the samples that each rank computes

    @property
    def num_empty_passes(self) -> int:
        """Passes that this rank makes beyond its own micro-batches, if passes are collective."""
        return self.max_micro_batches - len(self.micro_batches)


def micro_batch_plans(mini_batches: Iterable[MiniBatch]) -> Iterator[MicroBatchPlan]:
    """Iterates over the micro-batches of an update."""
    return (plan for mini_batch in mini_batches for plan in mini_batch.micro_batches)


def computed_samples(mini_batches: Iterable[MiniBatch]) -> list[int]:
    """Returns the indices of the samples that some rank computes, in order."""
    return sorted(index for mini_batch in mini_batches for share in mini_batch.shares for index in share)


def trained_tokens(sample: Sample, algorithm: ObjectiveOptions) -> NDArray[np.bool_] | None:
    """A mask of the sampled tokens that the objective trains on; None for all of them."""
    if algorithm.mask_truncated and sample.completion.finish == "length":
        return np.zeros(sample.completion.num_sampled, dtype=np.bool_)
    if algorithm.mask_older_tokens and sample.completion.token_versions is not None:
        versions = sample.token_versions
        newest: NDArray[np.bool_] = versions == versions.max(initial=0)
        return newest
    return None


def trained_lengths(samples: Sequence[Sample], algorithm: ObjectiveOptions) -> NDArray[np.int64]:
    """The number of tokens of each sample that the objective trains on [n]."""
    masks = [trained_tokens(sample, algorithm) for sample in samples]
    kept = [
        sample.completion.num_sampled if mask is None else int(mask.sum())
        for sample, mask in zip(samples, masks, strict=True)
    ]
    return np.array(kept, dtype=np.int64)


def split_groups(groups: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divides samples, given by their groups, into parts of consecutive whole groups; returns the indices of each part.

    The parts differ by at most one group. If there are fewer groups than parts, each group is a part.
    """
    distinct = list(dict.fromkeys(groups))
    num_parts = min(num_parts, len(distinct))
    part_of = {group: part for part, ids in enumerate(np.array_split(distinct, num_parts)) for group in ids.tolist()}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, group in enumerate(groups):
        parts[part_of[group]].append(index)
    return parts


def rank_shares(sizes: SequenceSizes, count: int) -> list[list[int]]:
    """Divides samples over ranks by their tokens; returns the indices of each rank, in order.

    Samples that share a prompt stay together, unless dividing them makes the largest share smaller: with few prompts,
    or a long tail, one rank would get too much.
    """
    divided = shares(sizes.alone, count)
    families = sizes.families
    if count == 1 or len(families) == len(sizes):
        return divided
    chosen = shares([sizes[members].total for members in families], count)
    together = [sorted(index for place in each for index in families[place].tolist()) for each in chosen]
    return min(together, divided, key=lambda found: max(sizes[share].total for share in found))


def split_batch(
    samples: Sequence[Sample],
    algorithm: ObjectiveOptions,
    *,
    num_steps: int,
    micro_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
    shares_prompts: bool = False,
    skipped: NDArray[np.bool_] | None = None,  # [n]
) -> list[MiniBatch]:
    """Returns the mini-batches of an update, with the micro-batches of one rank: its share has whole sequences.

    Samples that are `skipped` count in the weights and are in no micro-batch. If a mini-batch has no others, it
    computes its shortest sample: a step needs a gradient, and metrics need tokens.
    """
    sizes = SequenceSizes.of(samples, shares_prompts=shares_prompts)
    lengths = trained_lengths(samples, algorithm)
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    trajectories = Trajectories.of(samples)
    mini_batches = []
    for indices in split_groups([sample.group for sample in samples], num_steps):
        inside = np.asarray(indices, dtype=np.int64)
        computed = inside if skipped is None else inside[~skipped[inside]]
        if not len(computed):
            computed = inside[[np.argmin(sizes.alone[inside])]]
        shared = [computed[share] for share in rank_shares(sizes[computed], num_ranks)]
        bins = [sizes[share].bins(micro_tokens) for share in shared]
        weights = np.zeros(len(samples))
        weights[inside] = token_weights(
            lengths[inside], algorithm.average, algorithm.average_tokens, trajectories.part(inside)
        )
        imitation = None
        if algorithm.supervised is not None:
            imitation = np.zeros(len(samples))
            imitation[inside] = imitation_weights(rewards[inside], lengths[inside], algorithm.supervised.threshold)
        plans = [MicroBatchPlan(tuple(shared[rank][chosen].tolist())) for chosen in bins[rank]]
        shares_of_ranks = [share.tolist() for share in shared]
        mini_batches.append(
            MiniBatch(plans, sum(map(len, bins)), max(map(len, bins)), weights, imitation, shares_of_ranks)
        )
    return mini_batches
