"""Quarantine: trajectories that may kill instances run one at a time, so that one cannot take every instance along.

A rollout is quarantined once `QUARANTINE_AFTER` instances were lost while they generated for it. Its neighbours on
those instances are quarantined too, as any of them may be the cause. Only one quarantined rollout generates at a time:
the next loss under it is its failure. A rollout leaves the quarantine when it gets past the token at which instances
were lost, or to its end, and when another quarantined one fails for good: that was the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from stretto.core import messages as core
from stretto.errors import EngineError
from stretto.run.rollout import Rollout

QUARANTINE_AFTER = 4  # instances lost under one rollout
MARGIN = 64  # tokens past the context at the last loss: that context is an estimate of some time before


class Quarantine:
    """Counts the instances lost under each rollout in progress. For the loop's thread only."""

    def __init__(self, in_progress: Mapping[int, Rollout], post: Callable[[core.Event], None]) -> None:
        self._in_progress = in_progress
        self._post = post
        self._one_at_a_time = asyncio.Lock()
        self._running: Rollout | None = None  # the quarantined rollout that has the lock

    def note_loss(self, instance: int, error: EngineError, contexts: Mapping[int, int]) -> None:
        """Counts a lost instance for the rollouts that it generated for; `contexts` are their lengths, estimated."""
        for id, context in contexts.items():
            rollout = self._in_progress[id]
            rollout.losses += 1
            rollout.lost_at = max(rollout.lost_at, context)
            if rollout is self._running:
                reason = f"{rollout.losses} instances were lost while it ran on them, the last because {error}"
                self._post(core.GenerationFailed(rollout.id, reason, instance))

    def note_progress(self, contexts: Mapping[int, int]) -> None:
        """Clears the rollouts whose context has grown past the last loss."""
        for id, context in contexts.items():
            rollout = self._in_progress[id]
            if rollout.losses and context > rollout.lost_at + MARGIN:
                self._clear(rollout)

    def note_failure(self, rollout: Rollout) -> None:
        """Clears all others if a quarantined rollout failed for good."""
        if rollout.losses >= QUARANTINE_AFTER:
            for each in self._in_progress.values():
                each.losses = 0

    @asynccontextmanager
    async def generating(self, rollout: Rollout) -> AsyncIterator[None]:
        """Waits until no other quarantined rollout generates, if this one is quarantined.

        Clears it if nothing is raised inside.
        """
        if rollout.losses >= QUARANTINE_AFTER:
            await self._one_at_a_time.acquire()
            self._running = rollout
        try:
            yield
            self._clear(rollout)
        finally:
            self._let_next(rollout)

    def _clear(self, rollout: Rollout) -> None:
        rollout.losses = 0
        self._let_next(rollout)

    def _let_next(self, rollout: Rollout) -> None:
        if rollout is self._running:
            self._running = None
            self._one_at_a_time.release()
