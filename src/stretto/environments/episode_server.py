"""Serves what an episode that is played elsewhere asks for, from the policy of its trajectory."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from stretto.environments.episode_pipes import Answer, Ask, Refuse, Reported, Spent
from stretto.environments.protocol import Policy
from stretto.errors import BudgetError, RewardError
from stretto.types import Prompt


class EpisodeServer:
    """Serves one run of an episode. It keeps the context of each lineage, so that only new tokens travel."""

    def __init__(self, prompt: Prompt, policy: Policy) -> None:
        self._prompt = prompt.tokens
        self._policy = policy
        self._known: dict[int, tuple[int, ...]] = {}

    async def serve(self, message: Ask | Spent | Reported) -> Answer | Refuse | None:
        """Does what a message asks for. Returns the reply to a turn that was asked for."""
        match message:
            case Spent(_, amount, what):
                with contextlib.suppress(BudgetError):  # raised where the episode is played
                    self._policy.spend(amount, what)
            case Reported(_, reward):
                self._policy.report(reward)
            case Ask(episode, lineage, train, kept, tokens):
                context = self._known.get(lineage, self._prompt)[:kept] + tuple(tokens)
                try:
                    completion = await self._policy.generate(context, lineage=lineage, train=train)
                except RewardError as error:  # which the environment may handle
                    return Refuse(episode, error)
                self._known[lineage] = context + tuple(completion.tokens.tolist())
                # Supports and routing may be a hundred times as large as the tokens.
                sent = replace(completion, supports=None, routing=None)
                return Answer(episode, sent, self._policy.left)
        return None
