"""The handle of a run that this process runs: stops it from any thread, and says how it ended.

| call          | while the run starts | between the first and the last update | after the last update      |
|---------------|----------------------|---------------------------------------|----------------------------|
| `stop()`      | stops at update 0    | stops at the next update boundary     | does nothing               |
| `interrupt()` | ends the run         | stops at the next update boundary     | skips the last evaluation  |
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from stretto.observe.listeners import LiveRun, Outcome


class RunHandle:
    """Implements `LiveRun`. `stop` and `interrupt` are for any thread, and safe to call twice."""

    def __init__(self, folder: Path, shown: LiveRun | None = None) -> None:
        """`shown` is the object that listeners get; by default the handle itself."""
        self.folder = folder
        self.outcome: Outcome = "running"
        self.shown: LiveRun = shown or self
        self.interrupted = False
        self._lock = threading.Lock()
        self._stop_requested = False
        self._stop: Callable[[], object] | None = None  # while the loop runs
        self._cancel: Callable[[], object] | None = None  # while there is an event loop

    def stop(self) -> None:
        """Stops the run at the next update boundary."""
        with self._lock:
            self._stop_requested = True
            if self._stop is not None:
                self._stop()

    def interrupt(self) -> None:
        """Does what Ctrl-C does: stops a run that trains, and ends one that starts or evaluates."""
        with self._lock:
            if self._stop is not None:
                self._stop()
                return
            self.interrupted = True
            if self._cancel is not None:
                self._cancel()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets `interrupt` cancel the current task. Cancels it at once if there was an interrupt before."""
        task, running = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with self._lock:
            self._cancel = lambda: running.call_soon_threadsafe(task.cancel)
            if self.interrupted:
                self._cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Lets `stop` and `interrupt` call `stop` in this event loop. Calls it at once if one was called before."""
        running = asyncio.get_running_loop()
        with self._lock:
            self._stop = lambda: running.call_soon_threadsafe(stop)
            if self._stop_requested:
                self._stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None
