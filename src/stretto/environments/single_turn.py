"""The environment of tasks with one turn: generate a completion, score it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stretto.environments.grades import Grade
from stretto.environments.protocol import Policy
from stretto.environments.reward_calls import MESSAGES, Details
from stretto.types import Completion, Prompt

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""


class RewardSource(Protocol):
    """Scores completions, in this process or elsewhere."""

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion. Raises `RewardError`, which names the cause, if it has none."""
        ...


class SingleTurn:
    """Plays episodes of one completion, scored by `rewards`, which the caller starts and closes."""

    def __init__(self, rewards: RewardSource, decode: Decode, prefill: str = "") -> None:
        """`prefill` is what the chat template writes at the beginning of every answer."""
        self._rewards = rewards
        self._prefill = prefill
        self._decode = decode

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Grade:
        return await self.score(prompt, await policy.generate(prompt.tokens))

    async def score(self, prompt: Prompt, completion: Completion) -> float | Grade:
        """Returns the reward of the only turn. The run loop generates that turn itself and calls this alone."""
        row = prompt.row
        messages = row.get(MESSAGES)
        if messages is not None:  # a reward gets them only if it asks for them
            row = {name: value for name, value in row.items() if name != MESSAGES}
        tokens = completion.tokens
        details = Details(messages, tokens.astype("<i4").tobytes(), completion.version, self._prefill)
        return await self._rewards.score(prompt.text, self._decode(tokens.tolist()), row, details)
