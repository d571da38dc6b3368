"""Cutting the batch of an update into optimizer steps, and each of those into micro-batches. Pure but for tensors held.

Every part is of whole groups, in the order of the batch, so that what a step trains on does not depend on lengths. The
weights of tokens are those of the part: each step minimizes the average over its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.objectives.base import ObjectiveOptions
from stretto.training.losses import token_weights
from stretto.training.packing import first_fit_decreasing, input_lengths, sampled_lengths
from stretto.training.parallel import shares
from stretto.training.terms import imitated_weights
from stretto.types import Sample


@dataclass(slots=True)
class Piece:
    """The samples of one micro-batch, and what is known of their completion tokens [C] before the first step."""

    chosen: tuple[int, ...]  # indices into the batch
    proximal: torch.Tensor | None = None  # None: the only step of the update, so its own log-probabilities, detached
    reference: torch.Tensor | None = None  # where a divergence is measured
    values: torch.Tensor | None = None  # a critic's, at the start of the update
    returns: torch.Tensor | None = None  # what they are fitted to


@dataclass(frozen=True, slots=True)
class Part:
    """What one optimizer step trains on. Weights are indexed by the samples of the whole batch."""

    pieces: list[Piece]  # those of this rank
    num_pieces: int  # of all ranks
    most_pieces: int  # of any rank
    weights: NDArray[np.float64]  # [n], of each token of a sample in the loss; 0 outside of the part
    imitated: NDArray[np.float64] | None  # [n], of each token in the likelihood term


def pieces_of(parts: Iterable[Part]) -> Iterator[Piece]:
    """Every micro-batch of an update."""
    return (piece for part in parts for piece in part.pieces)


def cut_groups(groups: Sequence[int], num_parts: int) -> list[list[int]]:
    """The samples of each part: consecutive whole groups, as many as there are give or take one, in the batch's order.

    Where there are fewer groups than parts, there is a part for each group.
    """
    distinct = list(dict.fromkeys(groups))
    num_parts = min(num_parts, len(distinct))
    part_of = {group: part for part, ids in enumerate(np.array_split(distinct, num_parts)) for group in ids.tolist()}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, group in enumerate(groups):
        parts[part_of[group]].append(index)
    return parts


def cut_batch(
    samples: Sequence[Sample],
    algorithm: ObjectiveOptions,
    *,
    num_parts: int,
    micro_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Part]:
    """The parts of an update, with the micro-batches of one rank; its share of a part are whole sequences."""
    sizes = input_lengths(samples)
    lengths = sampled_lengths(samples)
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    parts = []
    for indices in cut_groups([sample.group for sample in samples], num_parts):
        inside = np.asarray(indices, dtype=np.int64)
        shared = [inside[share] for share in shares(sizes[inside], num_ranks)]
        bins = [first_fit_decreasing(sizes[share], micro_tokens) for share in shared]
        weights = np.zeros(len(samples))
        weights[inside] = token_weights(lengths[inside], algorithm.average, algorithm.average_tokens)
        imitated = None
        if algorithm.supervised is not None:
            imitated = np.zeros(len(samples))
            imitated[inside] = imitated_weights(rewards[inside], lengths[inside], algorithm.supervised.threshold)
        pieces = [Piece(tuple(shared[rank][chosen].tolist())) for chosen in bins[rank]]
        parts.append(Part(pieces, sum(map(len, bins)), max(map(len, bins)), weights, imitated))
    return parts
