"""Episodes without a model: trajectories whose turns follow from their contexts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.protocol import Environment, Outcome
from stretto.run.episodes import Episode
from stretto.run.turns import Turns
from stretto.types import Completion, Prompt

FOLDER = str(Path(__file__).parent)  # of `episode_environments.py`


class Game:
    """One trajectory: its turns are made of its number, its context and the number of the turn."""

    def __init__(self, number: int, does: str = "", *, turns: int = 2, max_tokens: int = 99, **limits: Any) -> None:
        self.prompt = Prompt(number, "text", (1, 2, number % 100), {"does": does, "turns": turns})
        self.turns = Turns(self.prompt.tokens)
        self.generated = 0
        self.episode = Episode(self.turns, self._take, max_tokens=max_tokens, deadline_s=60.0, **limits)

    async def _take(self, number: int, tokens: tuple[int, ...], lineage: int, train: bool) -> Completion:
        if (done := self.turns.get(number, tokens, lineage, train)) is not None:
            return done
        room = self.turns.room(number, tokens, lineage, train, max_turns=4, max_tokens=99, max_lineages=4)
        self.generated += 1
        made = np.array([sum(tokens) % 97, number, self.prompt.index % 89][:room], np.int32)
        completion = Completion(self.prompt.index, 0, made, np.zeros(len(made), np.float32), "stop", "sum")
        self.turns.add(tokens, completion, lineage, train)
        return completion

    async def play(self, environment: Environment) -> float | Outcome:
        async with asyncio.timeout(60):
            return await self.episode.play(environment, self.prompt)

    @property
    def story(self) -> list[tuple[Any, ...]]:
        return [(t.context, t.lineage, t.train, t.completion.tokens.tolist()) for t in self.turns.done]


async def play_all(environment: Environment, games: list[Game]) -> list[Any]:
    return await asyncio.gather(*(game.play(environment) for game in games), return_exceptions=True)


def played_here(name: str = "Talks") -> Environment:
    return load_environment(EnvironmentSpec(f"episode_environments:{name}", 4), None)
