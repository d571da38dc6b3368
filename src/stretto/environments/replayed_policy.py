"""A policy whose episode may begin again: it then returns the turns that it has had, and generates none twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.environments.protocol import Outcome, Policy, other_tokens
from stretto.errors import RewardError
from stretto.types import Completion


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn that was asked for, and what came of it."""

    key: int  # hash of what was asked: contexts are long
    answer: Completion | RewardError
    left: int  # tokens after it


class ReplayedPolicy:
    """The policy of one run of an episode by the run loop, which may be several runs on workers that are lost."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._asked: list[_Asked] = []
        self._position = 0  # turns that the present run has asked for
        self._first_left = policy.left
        self._spent = 0.0  # by the present run
        self._charged = 0.0  # passed on; a run that repeats another spends the same again

    def restart(self) -> None:
        """Begins another run."""
        self._position, self._spent = 0, 0.0

    @property
    def left(self) -> int:
        return self._asked[self._position - 1].left if self._position else self._first_left

    @property
    def budget_left(self) -> float:
        return self._policy.budget_left + self._charged - self._spent

    def spend(self, amount: float, what: str = "") -> None:
        if self._spent + amount > self._charged:
            self._policy.spend(self._spent + amount - self._charged, what)
            self._charged = self._spent + amount
        self._spent += amount

    def report(self, reward: float | Outcome) -> None:
        self._policy.report(reward)

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        context = tuple(tokens)
        key = hash((context, lineage, train))
        if self._position == len(self._asked):
            answer: Completion | RewardError
            try:
                answer = await self._policy.generate(context, lineage=lineage, train=train)
            except RewardError as error:
                answer = error
            self._asked.append(_Asked(key, answer, self._policy.left))
        asked = self._asked[self._position]
        if asked.key != key:
            raise other_tokens(self._position)
        self._position += 1
        if isinstance(asked.answer, RewardError):
            raise asked.answer
        return asked.answer
