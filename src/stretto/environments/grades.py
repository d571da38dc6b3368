"""The reward of a completion that several rewards score: their weighted sum, with its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_range import BEYOND, is_trainable
from stretto.errors import RewardError
from stretto.types import RewardPart


@dataclass(frozen=True, slots=True)
class Grade:
    """A reward that is the weighted sum of its parts, which a task with several rewards has."""

    reward: float
    parts: tuple[RewardPart, ...]  # in the order of the task's rewards


def graded(specs: Sequence[RewardSpec], scores: Sequence[float]) -> float | Grade:
    """Returns the reward of a completion with these scores, of which those that are NaN do not apply.

    It is a number if the task has one reward without a name. Raises `RewardError` if it cannot be trained on.
    """
    if len(specs) == 1 and not specs[0].name:
        return scores[0]
    parts = tuple(
        RewardPart(spec.name, spec.weight, None if score != score else score)
        for spec, score in zip(specs, scores, strict=True)
    )
    return Grade(total(parts), parts)


def total(parts: Sequence[RewardPart]) -> float:
    """Returns the weighted sum of the parts that apply. Raises `RewardError` if none does, or it is too large."""
    values = [part.weight * part.value for part in parts if part.value is not None]
    if not values:
        names = ", ".join(f"`{part.name}`" for part in parts)
        raise RewardError(f"no reward applies to this completion: {names} returned None; let one return a number")
    reward = math.fsum(values)
    if not is_trainable(reward):
        raise RewardError(f"the weighted sum of the rewards is {reward:g}, {BEYOND}")
    return reward
