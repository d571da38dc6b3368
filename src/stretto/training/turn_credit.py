"""Credit assignment by turn: the advantages of a batch whose episodes have several turns. Pure.

A change to the reward of a whole trajectory, such as for its length, counts as earned at its last turn. A divergence in
the reward is subtracted equally from every token of its trajectory, as without turns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stretto.objectives.base import AdvantageName
from stretto.training.advantages import Advantages, Reals, compared_penalties, turn_advantages
from stretto.training.packing import sampled_lengths
from stretto.types import Batch


def turn_rewards(batch: Batch, rewards: Reals) -> list[list[float]]:
    """The reward of each turn of each sample, given the shaped rewards of the samples [n]."""
    found = []
    for sample, reward in zip(batch.samples, rewards.tolist(), strict=True):
        *before, last = sample.rewards_by_turn
        added = reward - sample.reward
        found.append([*before, last + added if added else last])
    return found


def batch_turn_advantages(
    name: AdvantageName, batch: Batch, rewards: Reals, penalties: Reals, *, gamma: float
) -> Advantages:
    """`turn_advantages` of a batch, from its shaped rewards [n] and its divergence penalties [n].

    The environment's own rewards decide which groups count as without signal.
    """
    turns, groups = [sample.completion.turn_lengths for sample in batch.samples], [s.group for s in batch.samples]
    own = turn_advantages(name, [sample.rewards_by_turn for sample in batch.samples], turns, groups, gamma=gamma)
    found = turn_advantages(name, turn_rewards(batch, rewards), turns, groups, gamma=gamma)
    assert found.tokens is not None, "one advantage a token"
    penalty, lengths = compared_penalties(name, penalties, groups), sampled_lengths(batch.samples)
    return replace(
        found,
        values=found.values - penalty,
        tokens=found.tokens - np.repeat(penalty, lengths),
        num_without_signal=own.num_without_signal,
    )
