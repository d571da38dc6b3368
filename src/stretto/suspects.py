"""Trajectories that may be why instances die: one that kills what it runs on must not take every instance along.

Whatever has lost `LOSSES` instances is a suspect, its neighbours too. Only one suspect runs at a time, so the next loss
names it, and is a failure of its own. Who gets past the token at which instances were lost under it, or to its end, is
none any more; nor are those that had run beside one that failed for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from stretto.core import messages as core
from stretto.errors import EngineError
from stretto.flight import Flight

LOSSES = 4  # of instances under one trajectory, from which on it is suspected to be why
PAST = 64  # tokens beyond the last that was known of it when an instance was lost: what is known is not of that moment


class Suspects:
    """Over the trajectories that are `under_way`. For the loop's thread only."""

    def __init__(self, under_way: Mapping[int, Flight], post: Callable[[core.Event], None]) -> None:
        self._under_way = under_way
        self._post = post
        self._turn = asyncio.Lock()
        self._accused: Flight | None = None  # the one suspect that runs

    def lost(self, instance: int, error: EngineError, contexts: Mapping[int, int]) -> None:
        """An instance is lost; `contexts` are how far the trajectories on it were, as far as is known."""
        for id, context in contexts.items():
            flight = self._under_way[id]
            flight.losses += 1
            flight.lost_at = max(flight.lost_at, context)
            if flight is self._accused:
                reason = f"{flight.losses} instances were lost while it ran on them, the last because {error}"
                self._post(core.GenerationFailed(flight.id, reason, instance))

    def seen(self, contexts: Mapping[int, int]) -> None:
        """How far trajectories are."""
        for id, context in contexts.items():
            flight = self._under_way[id]
            if flight.losses and context > flight.lost_at + PAST:
                self._clear(flight)

    def failed_for_good(self, flight: Flight) -> None:
        """A suspect that fails is what killed instances."""
        if flight.losses >= LOSSES:
            for each in self._under_way.values():
                each.losses = 0

    @asynccontextmanager
    async def alone(self, flight: Flight) -> AsyncIterator[None]:
        """Wait until no other suspect runs, if this is one. It is cleared if nothing is raised inside."""
        if flight.losses >= LOSSES:
            await self._turn.acquire()
            self._accused = flight
        try:
            yield
            self._clear(flight)
        finally:
            self._let_go(flight)

    def _clear(self, flight: Flight) -> None:
        flight.losses = 0
        self._let_go(flight)

    def _let_go(self, flight: Flight) -> None:
        if flight is self._accused:
            self._accused = None
            self._turn.release()
