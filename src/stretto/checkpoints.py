"""When a run leaves a checkpoint: at the first publish after so many seconds, one at a time, and when it is stopped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from stretto import clock
from stretto.errors import RunError
from stretto.observe.progress import Observer
from stretto.store.journal import Journal


class Checkpoints:
    """`take` takes what a run is at this moment; what it returns writes that. None: there are no checkpoints."""

    def __init__(
        self,
        take: Callable[[], Coroutine[Any, Any, None]] | None,
        *,
        every_s: float,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self.every_s = every_s
        self._take = take
        self._journal = journal
        self._observer = observer
        self._last_at = math.inf  # when the last was begun
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The run begins: its first checkpoint is due `every_s` from now."""
        self._last_at = clock.now()

    def due(self) -> bool:
        """Whether one is to be made now."""
        return self._writing is None and clock.now() - self._last_at >= self.every_s

    def write(self, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]], version: int) -> None:
        """Make one beside the run.

        Nothing is awaited before the trainer is asked for its state, so it is that of this version.
        """
        self._last_at = clock.now()
        self._writing = spawn(self.save(), f"checkpoint of version {version}")

    async def written(self) -> None:
        """Return once none is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def save(self) -> None:
        """Leave one, if the run makes any. One that cannot be written costs the run nothing but a warning."""
        if self._take is None:
            return
        try:
            await self._take()
        except RunError as error:
            self._observer.message(f"warning: {error}; the run goes on")
            self._journal.note("checkpoint failed", str(error), at=clock.now())
        finally:
            self._writing = None
