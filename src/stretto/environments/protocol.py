"""The seam between the loop and a task: an episode asks a policy for completions and returns what they earned.

Contract:

- An episode asks for one turn after another. Each time it hands over the whole context: the prompt, all that was
  sampled and observed so far, and behind it what the policy is to observe before it goes on. Anything else is a
  `RewardError`. An episode asks at least once, and at most as often as its task says (`turns`); it awaits every turn
  to its end before it asks for the next, or returns.
- `rollout.max_tokens` bounds all tokens behind the prompt, sampled and observed ones together. `Policy.left` says how
  many there is room for. A turn that fills the room ends as `length`. Where an observation leaves no room for a token,
  or there was none before it, `generate` raises `RoomError`: the observation is not part of the trajectory, and the
  trajectory is recorded as cut at its length. The episode catches that and returns what was earned; one that lets it
  through fails.
- A trajectory's reward is what `episode` returns: a finite number, earned at the last turn, or an `Outcome` with one
  for each turn. An episode that fails raises `RewardError`; that is recorded with its trajectory, and the run goes on.
- An episode may be run again for the same trajectory: when it moves between instances, fails, or its run is taken up.
  The policy then hands back, in order, what it generated before, so nothing is sampled twice; an episode must therefore
  be deterministic in what it asks for.
- Episodes run side by side on one event loop: they await, and never block it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from stretto.errors import RewardError
from stretto.types import Completion, Prompt


class Policy(Protocol):
    """The version of the policy that one trajectory was started with."""

    @property
    def left(self) -> int:
        """How many tokens may still follow what there is, observed or sampled."""
        ...

    async def generate(self, tokens: Sequence[int]) -> Completion:
        """Go on from `tokens`, the whole context, to a stop token, a stop string or the token limit.

        Raises `RoomError` where there is no room for a token.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What each turn of an episode earned. The reward of the trajectory is their sum."""

    turns: tuple[float, ...]


class Environment(Protocol):
    """Whatever turns a prompt and a policy into a reward."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Run one episode to its end and return what it earned."""
        ...


def earned(outcome: object, num_turns: int) -> tuple[float, tuple[float, ...] | None]:
    """The reward of an episode of so many turns and, where it says so, of each. `RewardError` for what is neither."""
    if not num_turns:
        raise RewardError("the environment returned and never asked for a token: call `policy.generate`")
    if not isinstance(outcome, Outcome):
        return _finite(outcome), None
    if len(outcome.turns) != num_turns:
        raise RewardError(
            f"the environment returned an outcome of {len(outcome.turns)} turns, and the episode had {num_turns}: "
            "return a reward for each"
        )
    rewards = tuple(_finite(reward) for reward in outcome.turns)
    return _finite(math.fsum(rewards)), rewards


def _finite(reward: object) -> float:
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise RewardError(
            f"the environment returned {reward!r} for a reward: return a finite number, or an `Outcome` of them"
        )
    return float(reward)
