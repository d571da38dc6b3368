"""Group-relative advantages. Pure: rewards and group ids in, one number a sample out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Advantages:
    """One advantage a sample, in the order of the samples."""

    values: NDArray[np.float64]  # [n]
    num_groups: int
    num_without_signal: int  # groups of one, or whose rewards are all equal: their advantages are exactly 0


def group_relative(
    rewards: ArrayLike, groups: Sequence[int] | NDArray[np.int64], *, normalize_std: bool = True, eps: float = 1e-6
) -> Advantages:
    """A sample's reward minus the mean of its group, over the group's standard deviation plus `eps`.

    The deviation is the population's (divided by n), so that a group that lost a member to a failure is scaled like the
    others. Groups may have any number of members, in any order. The result is finite for finite rewards.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"`rewards` has shape {values.shape}, but `groups` has {len(groups)} entries: one a sample")
    if not np.isfinite(values).all():
        raise ValueError(f"`rewards` holds a number that is not finite at sample {int(np.argmin(np.isfinite(values)))}")
    if len(values) == 0:
        return Advantages(values, 0, 0)
    _, member_of, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    lowest = np.full(len(sizes), np.inf)
    highest = np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, member_of, values)
    np.maximum.at(highest, member_of, values)
    # Equality is tested on the rewards: the rounding of a mean must not become an advantage once divided by `eps`.
    without_signal = lowest == highest
    centred = values - (np.bincount(member_of, values) / sizes)[member_of]
    if normalize_std:
        deviation = np.sqrt(np.bincount(member_of, centred**2) / sizes)
        centred = centred / np.where(without_signal, 1.0, deviation + eps)[member_of]
    centred[without_signal[member_of]] = 0.0
    return Advantages(centred, len(sizes), int(without_signal.sum()))
