"""The schedule of checkpoints: at the first publish after so many seconds, one at a time, and when it is stopped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from stretto import clock
from stretto.errors import RunError
from stretto.observe.progress import Observer
from stretto.store.journal import Journal


class CheckpointSchedule:
    """Writes checkpoints beside a run. For the loop's thread only."""

    def __init__(
        self,
        capture: Callable[[], Coroutine[Any, Any, None]] | None,
        *,
        every_s: float,
        journal: Journal,
        observer: Observer,
    ) -> None:
        """`capture` takes the state of the run at once and returns the coroutine that writes it.

        None: the run makes no checkpoints.
        """
        self.every_s = every_s
        self._capture = capture
        self._journal = journal
        self._observer = observer
        self._last_at = math.inf  # when the last one was begun
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the clock: the first checkpoint is due in `every_s`."""
        self._last_at = clock.now()

    def is_due(self) -> bool:
        """True if a checkpoint is to be written now."""
        return self._writing is None and clock.now() - self._last_at >= self.every_s

    def write(self, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]], version: int) -> None:
        """Writes one beside the run.

        Nothing is awaited before the trainer is asked for its state, so it is the state of this version.
        """
        self._last_at = clock.now()
        self._writing = spawn(self.save(), f"checkpoint of version {version}")

    async def written(self) -> None:
        """Returns once no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def save(self) -> None:
        """Writes one, if the run makes any. If it cannot be written, the run continues with a warning."""
        if self._capture is None:
            return
        try:
            await self._capture()
        except RunError as error:
            self._observer.message(f"warning: {error}; the run continues")
            self._journal.note("checkpoint failed", str(error), at=clock.now())
        finally:
            self._writing = None
