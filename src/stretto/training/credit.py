"""Credit by turn: what each turn of an episode is held to have earned. Pure.

What is added to the reward of a whole trajectory, such as by its length, counts as earned at its last turn. A
divergence in the reward is taken off every token of its trajectory alike, as without turns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stretto.objectives.base import AdvantageName
from stretto.training.advantages import Advantages, Reals, compared_penalties, turn_advantages
from stretto.training.packing import sampled_lengths
from stretto.types import Batch


def turn_rewards(batch: Batch, rewards: Reals) -> list[list[float]]:
    """Of each turn of each sample, where the samples' rewards are `rewards` [n] by now."""
    found = []
    for sample, reward in zip(batch.samples, rewards.tolist(), strict=True):
        *before, last = sample.rewards_by_turn
        added = reward - sample.reward
        found.append([*before, last + added if added else last])
    return found


def turn_credit(name: AdvantageName, batch: Batch, rewards: Reals, penalties: Reals, *, gamma: float) -> Advantages:
    """`turn_advantages` of a batch, from its shaped rewards [n] and what is taken off them for a divergence [n].

    Groups without signal are those of the environment's own rewards.
    """
    turns, groups = [sample.completion.turn_lengths for sample in batch.samples], [s.group for s in batch.samples]
    own = turn_advantages(name, [sample.rewards_by_turn for sample in batch.samples], turns, groups, gamma=gamma)
    found = turn_advantages(name, turn_rewards(batch, rewards), turns, groups, gamma=gamma)
    assert found.tokens is not None, "a number a token"
    apart, lengths = compared_penalties(name, penalties, groups), sampled_lengths(batch.samples)
    return replace(
        found,
        values=found.values - apart,
        tokens=found.tokens - np.repeat(apart, lengths),
        num_without_signal=own.num_without_signal,
    )
