"""Rewards that are given from Python: a function, or several with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.environments.function_specs import function_name
from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its weight, for `stretto.train(reward=[...])`.

    - `function`: called as `function(prompt, completion, **row)`, or with batches as TRL calls it.
    - `weight`: its factor in the sum of the rewards; 0: it is recorded and does not count.
    - `name`: in metrics and in the journal, unique; by default that of the function.
    - `batched`: True if it is called with lists of completions; by default told by the names of its parameters.
    - `batch_size`: the most completions of one call, if it is batched; by default 512.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    batched: bool | None = None
    batch_size: int | None = None

    def table(self, target: str) -> dict[str, Any]:
        """Returns the table `[[task.rewards]]` of a recipe; `target` stands for the function."""
        found: dict[str, Any] = {"name": self.shown_name, "function": target, "weight": self.weight}
        optional = {"batched": self.batched, "batch_size": self.batch_size}
        return found | {key: value for key, value in optional.items() if value is not None}

    @property
    def shown_name(self) -> str:
        """The name that it has in metrics and in the journal."""
        return self.name or function_name(getattr(self.function, "__name__", type(self.function).__name__))


Rewards = Callable[..., Any] | Reward | Sequence[Callable[..., Any] | Reward]
"""The argument `reward` of `stretto.train`."""


def several(reward: Rewards | None) -> list[Reward] | None:
    """Returns the rewards with weights; None if it is one function without. Raises `RecipeError` for anything else."""
    if isinstance(reward, Reward):
        reward = [reward]
    if reward is None or callable(reward):
        return None
    given: Any = reward
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RecipeError(f"`reward` is {reward!r:.80}, which cannot be called: give a function, or a list of them")
    found = [each if isinstance(each, Reward) else Reward(each) for each in reward]
    for each in found:
        if not callable(each.function):
            raise RecipeError(f"`reward` has {each.function!r:.80}, which cannot be called: give a function")
    if not found:
        raise RecipeError("`reward` is an empty list: give a function, or leave it out")
    return found
