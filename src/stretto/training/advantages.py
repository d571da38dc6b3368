"""Advantages by name: from rewards, one number a sample or a token, in float64, never NaN. Pure.

| name | a sample's advantage |
|---|---|
| `group` | reward minus its group's mean, over the group's standard deviation plus epsilon (GRPO) |
| `group-mean` | reward minus its group's mean (Dr. GRPO) |
| `leave-one-out` | reward minus the mean of the other members of its group (RLOO) |
| `whiten` | reward minus the batch's mean, over the batch's standard deviation plus epsilon (REINFORCE++) |
| `gae` | one number a token, from the values of a critic: `gae` over `token_rewards` |

With credit by turn (`turn_advantages`) the first four compare the rewards from each turn on, and give one number a
turn.

A group of one, or one whose rewards are all equal, has nothing to compare: its advantages are exactly 0, and it is
counted as without signal. `whiten` compares the whole batch, so either all of its groups are without signal or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stretto.objectives.base import AdvantageName

EPSILON = 1e-6  # added to a standard deviation before dividing by it
LARGEST = 1e100  # squares of larger numbers overflow float64

Reals = NDArray[np.float64]
Groups = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Advantages:
    """One advantage a sample, in the order of the samples, and one a token if tokens differ."""

    values: Reals  # [n]; if tokens differ, the mean over each sample's tokens
    num_groups: int
    num_without_signal: int  # groups of one, or whose rewards are all equal: their advantages are exactly 0
    tokens: Reals | None = None  # [C], sample after sample; None: every token has its sample's advantage

    def digest(self) -> str:
        """Returns a digest of all bits of the advantages."""
        digest = blake2b(np.ascontiguousarray(self.values, dtype="<f8").tobytes(), digest_size=16)
        if self.tokens is not None:
            digest.update(np.ascontiguousarray(self.tokens, dtype="<f8").tobytes())
        return digest.hexdigest()

    def of_tokens(self, lengths: NDArray[np.int64]) -> Reals:
        """The advantage of every token [C], for samples of the given lengths [n]."""
        return np.repeat(self.values, lengths) if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards by group. `centred` is exactly 0 if a group has no signal."""

    centred: Reals  # [n]
    member_of: NDArray[np.int64]  # [n], from 0
    sizes: NDArray[np.int64]  # [groups]
    without_signal: NDArray[np.bool_]  # [groups]

    def result(self, values: Reals) -> Advantages:
        return Advantages(values, len(self.sizes), int(self.without_signal.sum()))


def group_relative(
    rewards: ArrayLike, groups: Groups, *, normalize_std: bool = True, eps: float = EPSILON
) -> Advantages:
    """A sample's reward minus the mean of its group, over the group's standard deviation plus `eps`.

    The standard deviation is the population's (divided by n), so that a group that lost a member to a failure is scaled
    like the others. Groups may have any number of members, in any order.
    """
    grouped = _grouped(rewards, groups)
    if not normalize_std:
        return grouped.result(grouped.centred)
    deviation = np.sqrt(np.bincount(grouped.member_of, grouped.centred**2) / grouped.sizes)
    return grouped.result(grouped.centred / np.where(grouped.without_signal, 1.0, deviation + eps)[grouped.member_of])


def group_mean(rewards: ArrayLike, groups: Groups) -> Advantages:
    """A sample's reward minus the mean of its group."""
    return group_relative(rewards, groups, normalize_std=False)


def leave_one_out(rewards: ArrayLike, groups: Groups) -> Advantages:
    """A sample's reward minus the mean of the others of its group."""
    grouped = _grouped(rewards, groups)
    # r - (n m - r) / (n - 1) = (r - m) n / (n - 1)
    scale = grouped.sizes / np.maximum(grouped.sizes - 1, 1)
    return grouped.result(grouped.centred * scale[grouped.member_of])


def whiten(rewards: ArrayLike, groups: Groups, *, eps: float = EPSILON) -> Advantages:
    """A sample's reward minus the mean of the batch, over the batch's standard deviation plus `eps`.

    Samples have equal weight, whatever their length. A group of equal rewards has a signal here: it is compared with
    the other prompts.
    """
    values = _checked(rewards, groups)
    num_groups = len(np.unique(np.asarray(groups))) if len(values) else 0
    whole = group_relative(values, np.zeros(len(values), dtype=np.int64), eps=eps)
    return Advantages(whole.values, num_groups, num_groups if whole.num_without_signal else 0)


ADVANTAGES: dict[str, Callable[[ArrayLike, Groups], Advantages]] = {
    "group": group_relative,
    "group-mean": group_mean,
    "leave-one-out": leave_one_out,
    "whiten": whiten,
}


def outcome_advantages(name: AdvantageName, rewards: ArrayLike, groups: Groups) -> Advantages:
    """The advantages called `name`, from one reward a sample. Not `gae`, which needs values."""
    if name not in ADVANTAGES:
        raise ValueError(f"`advantage = {name!r}` needs more than rewards: choose one of {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name](rewards, groups)


def penalized_advantages(
    name: AdvantageName,
    rewards: ArrayLike,
    penalties: ArrayLike,  # [n], of each sample
    groups: Groups,
) -> Advantages:
    """The advantages of the rewards minus `compared_penalties`.

    Penalties are compared like rewards but never divided by a standard deviation. Dividing rewards and penalties
    together would lose the penalties' scale: if the rewards of a group are equal, penalties of any size would become
    advantages around 1. Without division (`group-mean`, `leave-one-out`) this is the advantage of the difference.
    """
    found = outcome_advantages(name, rewards, groups)
    return replace(found, values=found.values - compared_penalties(name, penalties, groups))


def join_advantages(
    parts: Sequence[tuple[NDArray[np.int64], Advantages]], lengths: NDArray[np.int64], groups: Groups
) -> Advantages:
    """Joins the advantages of parts of a batch, each with the indices of its samples. `lengths` [n] are tokens.

    A group may have samples in several parts. It has no signal if all of its samples are in parts without any.
    """
    values, starts = np.zeros(len(lengths)), np.cumsum(lengths) - lengths
    by_token = any(part.tokens is not None for _, part in parts)
    tokens = np.zeros(int(lengths.sum())) if by_token else None
    for own, part in parts:
        values[own] = part.values
        if tokens is not None and part.tokens is not None:
            ends = starts[own] + lengths[own]
            spans = zip(starts[own].tolist(), ends.tolist(), strict=True)
            tokens[np.concatenate([np.arange(start, end) for start, end in spans])] = part.tokens
    group_of = np.asarray(groups)
    loud = [group_of[own] for own, part in parts if part.num_without_signal < part.num_groups]
    num_groups, num_loud = (len(np.unique(each)) for each in (group_of, np.concatenate([group_of[:0], *loud])))
    return Advantages(values, num_groups, num_groups - num_loud, tokens)


def compared_penalties(name: AdvantageName, penalties: ArrayLike, groups: Groups) -> Reals:
    """Each penalty minus the mean penalty of the samples that the advantages called `name` compare with [n]."""
    given = _checked(penalties, groups)
    if name == "whiten":
        return group_mean(given, np.zeros(len(given), dtype=np.int64)).values
    return (leave_one_out(given, groups) if name == "leave-one-out" else group_mean(given, groups)).values


def _checked(rewards: ArrayLike, groups: Groups) -> Reals:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"`rewards` has shape {values.shape}, but `groups` has {len(groups)} entries: one a sample")
    if not np.isfinite(values).all():
        raise ValueError(f"`rewards` has a number that is not finite at sample {int(np.argmin(np.isfinite(values)))}")
    if len(values) and np.abs(values).max() > LARGEST:
        raise ValueError(
            f"`rewards` has {values[np.argmax(np.abs(values))]:.3g} at sample {int(np.argmax(np.abs(values)))}: "
            f"scale them to at most {LARGEST:g}"
        )
    return values


def _grouped(rewards: ArrayLike, groups: Groups) -> _Grouped:
    values = _checked(rewards, groups)
    if len(values) == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return _Grouped(values, nothing, nothing, nothing.astype(np.bool_))
    _, member_of, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    lowest = np.full(len(sizes), np.inf)
    highest = np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, member_of, values)
    np.maximum.at(highest, member_of, values)
    # Equality is tested on the rewards: the rounding error of a mean, divided by epsilon, would become an advantage.
    without_signal = lowest == highest
    centred = values - (np.bincount(member_of, values) / sizes)[member_of]
    centred[without_signal[member_of]] = 0.0
    return _Grouped(centred, member_of, sizes, without_signal)


# -- by token ----------------------------------------------------------------------------------------------------------


def token_rewards(
    rewards: Sequence[float] | Sequence[Sequence[float]],
    lengths: Sequence[int] | NDArray[np.int64],
    turns: Sequence[Sequence[int]] | None = None,
) -> Reals:
    """Places rewards at the tokens where they were earned [C]: the last token of a sample, or of each of its turns.

    `lengths` [n] are the tokens of each sample. Without `turns` a sample has one reward. With them, `turns[i]` are the
    tokens of each turn of sample `i`, which sum to its length, and `rewards[i]` has a number for each of its turns. The
    reward of a turn without tokens goes to the token before it; a sample without tokens has no place for one.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    parts: Sequence[Sequence[int]] = [[size] for size in sizes.tolist()] if turns is None else turns
    per_turn = cast(Sequence[Sequence[float]], [[reward] for reward in rewards] if turns is None else rewards)
    _check_turns(per_turn, parts, sizes)
    placed = np.zeros(int(sizes.sum()))
    start = 0
    for given, sample_turns, size in zip(per_turn, parts, sizes.tolist(), strict=True):
        if size:
            ends = np.maximum(np.cumsum(sample_turns) - 1, 0)
            np.add.at(placed, start + ends, given)
        start += size
    return placed


def gae(
    rewards: Reals,  # [C], of each token
    values: Reals,  # [C], the critic's for the state before each token
    lengths: Sequence[int] | NDArray[np.int64],  # [n], tokens of each sequence
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Reals, Reals]:
    """Generalized advantage estimation: advantages [C], and the returns [C] that are the critic's targets.

    `A_t = d_t + gamma * lam * A_(t+1)` with `d_t = r_t + gamma * V_(t+1) - V_t`. After the last token both are 0, so a
    truncated sequence counts as ended. A return is `A_t + V_t`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    earned, critic = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if earned.shape != critic.shape or earned.shape != (int(sizes.sum()),):
        raise ValueError(f"{int(sizes.sum())} tokens have {earned.shape} rewards and {critic.shape} values: one each")
    following = np.append(critic[1:], 0.0) if len(critic) else critic
    ends = np.cumsum(sizes)
    following[(ends - 1)[sizes > 0]] = 0.0
    advantages = earned + gamma * following - critic
    decay = gamma * lam
    if decay:
        # Backwards over positions, for all sequences that reach a position at once: the longest come first.
        order = np.argsort(-sizes, kind="stable")
        starts = (ends - sizes)[order]
        reached = np.searchsorted(-sizes[order], -np.arange(1, int(sizes.max(initial=0)) + 1), side="right")
        for position in range(len(reached) - 2, -1, -1):
            here = starts[: reached[position + 1]] + position
            advantages[here] += decay * advantages[here + 1]
    return advantages, advantages + critic


def gae_advantages(
    advantages: Reals, lengths: NDArray[np.int64], groups: Groups, *, normalize: bool, eps: float = EPSILON
) -> Advantages:
    """Turns the result of `gae` into the advantages of a batch; `normalize` whitens them over all of its tokens.

    If all tokens of a batch have the same advantage, whitening gives 0, and its groups count as without signal.
    """
    tokens = np.asarray(advantages, dtype=np.float64)
    num_groups = len(np.unique(np.asarray(groups))) if len(groups) else 0
    without_signal = 0
    if normalize and len(tokens):
        equal = bool(tokens.max() == tokens.min())
        without_signal = num_groups if equal else 0
        tokens = np.zeros_like(tokens) if equal else (tokens - tokens.mean()) / (tokens.std() + eps)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    values = np.bincount(owner, tokens, minlength=len(lengths)) / np.maximum(lengths, 1)
    return Advantages(values, num_groups, without_signal, tokens)


def turn_advantages(
    name: AdvantageName,
    rewards: Sequence[Sequence[float]],  # of each turn of each sample
    turns: Sequence[Sequence[int]],  # tokens of each turn of each sample
    groups: Groups,
    *,
    gamma: float = 1.0,
) -> Advantages:
    """Credit by turn: every token of a turn has the advantage of the rewards that its sample earned from that turn on.

    The returns `sum_(k >= j) gamma^(k - j) r_k` of turn `j` are compared between the members of a group that reached
    turn `j` (under `whiten`: between all samples that did), by the rule called `name`. A turn that only one member
    reached has an advantage of 0. With one turn a sample this is `outcome_advantages`. A group counts as without signal
    if none of its turns has any.
    """
    lengths = np.array([sum(sample_turns) for sample_turns in turns], dtype=np.int64)
    _check_turns(rewards, turns, lengths)
    if len(groups) != len(turns):
        raise ValueError(f"`turns` has {len(turns)} samples, but `groups` has {len(groups)} entries: one a sample")
    counts = np.array([len(sample_turns) for sample_turns in turns], dtype=np.int64)
    owner = np.repeat(np.arange(len(turns)), counts)
    number = np.concatenate([np.arange(count) for count in counts]) if len(counts) else counts
    returns: list[float] = []
    for given in rewards:
        later = 0.0
        from_here = [later := reward + gamma * later for reward in reversed(given)]
        returns.extend(reversed(from_here))
    of_turns = np.zeros(len(owner))
    of_groups = np.asarray(groups, dtype=np.int64)
    signal: set[int] = set()
    for turn in range(int(counts.max(initial=0))):
        here = np.flatnonzero(number == turn)
        members = of_groups[owner[here]]
        found = outcome_advantages(name, np.array(returns)[here], members)
        of_turns[here] = found.values
        signal.update(members[found.values != 0.0].tolist())
    of_tokens = np.repeat(of_turns, [tokens for sample_turns in turns for tokens in sample_turns])
    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    values = np.bincount(sample_of, of_tokens, minlength=len(lengths)) / np.maximum(lengths, 1)
    num_groups = len(set(of_groups.tolist()))
    return Advantages(values, num_groups, num_groups - len(signal), of_tokens)


def _check_turns(
    rewards: Sequence[Sequence[float]], turns: Sequence[Sequence[int]], lengths: NDArray[np.int64]
) -> None:
    if not len(rewards) == len(turns) == len(lengths):
        raise ValueError(f"`rewards` has {len(rewards)} samples, `turns` {len(turns)} and `lengths` {len(lengths)}")
    for sample, (given, parts, length) in enumerate(zip(rewards, turns, lengths.tolist(), strict=True)):
        if len(given) != len(parts):
            raise ValueError(f"sample {sample} has {len(parts)} turns and {len(given)} rewards: one a turn")
        if min(parts, default=0) < 0 or sum(parts) != length:
            raise ValueError(f"the turns of sample {sample} have {list(parts)} tokens, and the sample has {length}")
        if not np.isfinite(np.asarray(given, dtype=np.float64)).all():
            raise ValueError(f"`rewards` has a number that is not finite at sample {sample}")
