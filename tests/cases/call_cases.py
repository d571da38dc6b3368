"""Actors in this process, which may die, hang, or not be heard. No cluster is needed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from stretto.cluster.actor_calls import CallServer


class Line:
    """An actor in this process; what it is asked, and what it answers, may get lost on the way."""

    def __init__(self, served: CallServer, lossy: float = 0.0) -> None:
        self.served, self.lossy, self.random = served, lossy, random.Random(0)
        self.hangs = self.dead = self.ended = False
        self.deliver = _Method(self, self._deliver)
        self.collect = _Method(self, served.collect)

    async def _deliver(self, messages: Any) -> None:
        self.served.deliver(messages)


class _Method:
    def __init__(self, line: Line, work: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.line, self.work = line, work

    def remote(self, argument: Any) -> Coroutine[Any, Any, Any]:
        return self._call(argument)

    async def _call(self, argument: Any) -> Any:
        line = self.line
        if line.hangs:
            await asyncio.sleep(60)
        if line.dead:
            raise ActorDiedError()
        if line.random.random() < line.lossy:
            raise ActorUnavailableError("on the way there", None)
        answer = await self.work(argument)
        if line.random.random() < line.lossy:
            raise ActorUnavailableError("on the way back", None)
        return answer
