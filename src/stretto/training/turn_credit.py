"""Credit assignment by turn: the advantages of a batch whose episodes have several turns. Pure.

Turns are numbered over all lineages of a trajectory, in the order in which they were asked for. A turn of a lineage
that is not trained has no tokens here, and its reward counts for the turns before it.

A change to the reward of a whole trajectory, such as for its length, counts as earned at its last turn. A divergence in
the reward is subtracted equally from every token of its trajectory, as without turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stretto.objectives.base import AdvantageName
from stretto.training.advantages import Advantages, Reals, compared_penalties, turn_advantages
from stretto.training.packing import sampled_lengths
from stretto.training.trajectories import Trajectories
from stretto.types import Batch, Sample


def turn_rewards(batch: Batch, rewards: Reals) -> list[list[float]]:
    """The reward of each turn of each sample, given the shaped rewards of their trajectories [n]."""
    found = []
    for sample, reward in zip(batch.samples, rewards.tolist(), strict=True):
        *before, last = sample.rewards_by_turn
        added = reward - sample.reward
        found.append([*before, last + added if added else last])
    return found


@dataclass(frozen=True, slots=True)
class _Episode:
    """The turns of a trajectory, over all of its lineages."""

    rewards: list[float]  # the environment's own, of each turn
    lengths: list[int]  # sampled tokens of each turn

    @classmethod
    def of(cls, samples: list[Sample]) -> _Episode:
        """Makes it from the samples of a trajectory. Its reward is earned at its last turn, if turns are not told
        apart; if that is of a lineage that is not trained, at the last one that is."""
        lengths: dict[int, int] = {}
        for sample in samples:
            lengths |= zip(turn_numbers(sample), sample.completion.turn_lengths, strict=True)
        given = samples[0].turn_rewards
        count = max(lengths) + 1 if given is None else len(given)
        rewards = [0.0] * (count - 1) + [samples[0].reward] if given is None else list(given)
        return cls(rewards, [lengths.get(number, 0) for number in range(count)])

    def shaped(self, added: float) -> list[float]:
        """The rewards of the turns with `added` at the last one."""
        return [*self.rewards[:-1], self.rewards[-1] + added] if added else self.rewards


def turn_numbers(sample: Sample) -> tuple[int, ...]:
    """The numbers of a sample's turns among all turns of its trajectory."""
    return sample.turn_numbers or tuple(range(len(sample.completion.turn_lengths)))


def batch_turn_advantages(
    name: AdvantageName, batch: Batch, rewards: Reals, penalties: Reals, *, gamma: float
) -> Advantages:
    """`turn_advantages` of a batch, from the shaped rewards and the divergence penalties of its trajectories [n].

    The environment's own rewards decide which groups count as without signal.
    """
    trajectories = Trajectories.of(batch.samples)
    owners, first = trajectories.owners, trajectories.first
    rows: list[list[Sample]] = [[] for _ in first]
    for sample, owner in zip(batch.samples, owners.tolist(), strict=True):
        rows[owner].append(sample)
    episodes = [_Episode.of(own) for own in rows]
    turns, groups = [episode.lengths for episode in episodes], [own[0].group for own in rows]
    added = rewards[first] - np.array([own[0].reward for own in rows])
    shaped = [episode.shaped(each) for episode, each in zip(episodes, added.tolist(), strict=True)]
    own = turn_advantages(name, [episode.rewards for episode in episodes], turns, groups, gamma=gamma)
    found = turn_advantages(name, shaped, turns, groups, gamma=gamma)
    assert found.tokens is not None, "one advantage a token"
    tokens, lengths = _of_rows(batch, owners, found.tokens, episodes), sampled_lengths(batch.samples)
    penalty = compared_penalties(name, penalties[first], groups)[owners]
    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    values = np.bincount(sample_of, tokens, minlength=len(lengths)) / np.maximum(lengths, 1)
    return replace(
        found,
        values=values - penalty,
        tokens=tokens - np.repeat(penalty, lengths),
        num_without_signal=own.num_without_signal,
    )


def _of_rows(batch: Batch, owners: NDArray[np.int64], tokens: Reals, episodes: list[_Episode]) -> Reals:
    """The advantages of the tokens of each sample, from those of each trajectory, which are turn after turn."""
    ends = np.cumsum([length for episode in episodes for length in episode.lengths])
    starts = np.concatenate([[0], ends])
    counts = np.array([len(episode.lengths) for episode in episodes])
    first_turn = np.cumsum(counts) - counts  # of each trajectory, among the turns of all
    parts = [tokens[:0]]
    for sample, owner in zip(batch.samples, owners.tolist(), strict=True):
        places = [int(first_turn[owner]) + number for number in turn_numbers(sample)]
        parts += [tokens[starts[place] : starts[place + 1]] for place in places]
    return np.concatenate(parts)
