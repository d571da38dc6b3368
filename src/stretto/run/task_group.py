"""The asyncio tasks of a run: each has a name, the first failure is kept, and none outlives the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from stretto.errors import TaskCancelledError


class TaskGroup:
    """Tasks of one event loop. `on_failure` is called when one of them fails for the first time.

    Only `end` cancels a task. One that somebody else cancelled has failed: what it was to do is not done.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None  # the first
        self._on_failure = on_failure
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task that nobody has to await."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancels all of them, and returns once they have ended."""
        self._ending = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            error: BaseException | None = None if self._ending else TaskCancelledError(_cancelled(task.get_name()))
        else:
            error = task.exception()
        if error is not None and self.failure is None:
            self.failure = error
            self._on_failure()


def _cancelled(name: str) -> str:
    return (
        f"the task `{name}` of the run was cancelled, and the run did not cancel it: an environment may cancel no task "
        "but its own"
    )
