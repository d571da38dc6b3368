"""The seam between the loop and a task: an episode asks a policy for completions and returns a reward.

Contract:

- A trajectory's reward is what `episode` returns, a finite number. An episode that fails raises `RewardError`; that is
  recorded with its trajectory, and the run goes on.
- An episode may be run again for the same trajectory. The policy then hands back, in order, what it generated before,
  so nothing is sampled twice; an episode must therefore be deterministic in what it asks for.
- Episodes run side by side on one event loop: they await, and never block it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.types import Completion, Prompt


class Policy(Protocol):
    """The version of the policy that one trajectory was started with."""

    async def generate(self, tokens: Sequence[int]) -> Completion:
        """Go on from `tokens` to a stop token, a stop string or the token limit."""
        ...


class Environment(Protocol):
    """Whatever turns a prompt and a policy into a reward."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        """Run one episode to its end and return its reward."""
        ...
