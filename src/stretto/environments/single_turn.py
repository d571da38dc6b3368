"""The smallest environment: ask once, score the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.environments.protocol import Policy
from stretto.environments.rewards import RewardPool
from stretto.types import Prompt

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""


class SingleTurn:
    """One completion per episode, scored by a reward function. The pool is the caller's to start and to close."""

    def __init__(self, rewards: RewardPool, decode: Decode) -> None:
        self._rewards = rewards
        self._decode = decode

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        completion = await policy.generate(prompt.tokens)
        return await self._rewards.score(prompt.text, self._decode(completion.tokens.tolist()), prompt.row)
