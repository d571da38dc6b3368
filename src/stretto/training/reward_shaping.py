"""Reward shaping by length, before advantages are computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stretto.objectives.length_options import OverlongOptions, RelativeOptions
from stretto.training.advantages import Groups, Reals


@dataclass(frozen=True, slots=True)
class ShapedRewards:
    """Rewards after shaping, and metrics of the change."""

    rewards: Reals  # [n]
    metrics: Mapping[str, float]


def overlong_penalty(lengths: NDArray[np.int64], *, max_tokens: int, cache: int) -> Reals:
    """0 up to `max_tokens - cache` tokens, then falling linearly to -1 at `max_tokens`, and -1 beyond [n]."""
    return np.clip((max_tokens - cache - lengths) / cache, -1.0, 0.0)


def relative_length_reward(
    rewards: Reals, groups: Groups, lengths: NDArray[np.int64], *, threshold: float = 0.0
) -> Reals:
    """1/2 for a group's shortest completion, -1/2 for its longest, linear between, 0 if all lengths are equal [n].

    An answer whose reward is not above `threshold` gains nothing by being short.
    """
    if len(lengths) == 0:
        return np.zeros(0)
    _, member_of = np.unique(np.asarray(groups), return_inverse=True)
    shortest = np.full(int(member_of.max()) + 1, np.iinfo(np.int64).max)
    longest = np.zeros_like(shortest)
    np.minimum.at(shortest, member_of, lengths)
    np.maximum.at(longest, member_of, lengths)
    spread = (longest - shortest)[member_of]
    linear = np.where(spread > 0, 0.5 - (lengths - shortest[member_of]) / np.maximum(spread, 1), 0.0)
    return np.where(np.asarray(rewards) > threshold, linear, np.minimum(linear, 0.0))


def shape_rewards(
    rewards: ArrayLike,
    groups: Groups,
    lengths: ArrayLike,
    options: OverlongOptions | RelativeOptions | None,
    *,
    max_tokens: int,  # of a completion: where the overlong penalty is full, unless the options say otherwise
) -> ShapedRewards:
    """Returns the rewards that advantages are computed from [n]; without `options` they are the given ones.

    `length_shaped` counts the samples whose reward changed. `length_shaping` is the mean change.
    """
    given = np.asarray(rewards, dtype=np.float64)
    tokens = np.asarray(lengths, dtype=np.int64)
    if options is None:
        return ShapedRewards(given, {})
    if isinstance(options, OverlongOptions):
        full = options.max_tokens if options.max_tokens is not None else max_tokens
        added = overlong_penalty(tokens, max_tokens=full, cache=options.cache)
    else:
        added = relative_length_reward(given, groups, tokens, threshold=options.threshold)
    added = options.weight * added
    metrics = {
        "length_shaped": float(np.count_nonzero(added)),
        "length_shaping": float(added.mean()) if len(added) else 0.0,
    }
    return ShapedRewards(given + added, metrics)
