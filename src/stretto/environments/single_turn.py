"""The smallest environment: ask once, score the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stretto.environments.protocol import Policy
from stretto.types import Prompt

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""


class Scores(Protocol):
    """Whatever gives completions their rewards."""

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The reward of one completion, or a `RewardError` that says what went wrong."""
        ...


class SingleTurn:
    """One completion per episode, scored by a reward function. What scores is the caller's to start and to close."""

    def __init__(self, rewards: Scores, decode: Decode) -> None:
        self._rewards = rewards
        self._decode = decode

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        completion = await policy.generate(prompt.tokens)
        return await self._rewards.score(prompt.text, self._decode(completion.tokens.tolist()), prompt.row)
