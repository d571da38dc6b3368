"""The trainer's thread: one worker with its own torch thread count, so that an update never blocks the loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from stretto.errors import StalledError, StrettoError, TrainerError
from stretto.training.trainer import Trainer
from stretto.types import Batch, UpdateReport, Weights

Result = TypeVar("Result")


class TrainerRole:
    """Runs a trainer in a thread of its own. Whatever it raises is a `TrainerError` that names the update.

    Nothing waits for that thread longer than `deadline_s`. It cannot be killed, so after that it is left to itself: it
    is a daemon, and keeps no process from ending.
    """

    def __init__(self, trainer: Trainer, threads: int, *, deadline_s: float) -> None:
        self.trainer = trainer
        self._threads = threads
        self._deadline_s = deadline_s
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any], str] | None] = SimpleQueue()
        self._doing = "nothing"
        self._hangs = False
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        """One update, and a copy of the weights that it made: version `batch.update + 1`."""

        def work() -> tuple[UpdateReport, Weights]:
            return self.trainer.update(batch), self.trainer.weights(batch.update + 1)

        try:
            return await self.call(work, f"update {batch.update}")
        except StrettoError:
            raise
        except Exception as error:
            raise TrainerError(f"update {batch.update} failed: {type(error).__name__}: {error}") from error

    async def call(self, work: Callable[[], Result], name: str) -> Result:
        """Run something in the trainer's thread, after what is already there; `name` is what errors call it."""
        future: Future[Result] = Future()
        self._work.put((work, future, name))
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiting}, timeout=self._deadline_s)
            if waiting.done():
                return waiting.result()
            self._hangs = True
            raise StalledError(
                f"{name} has not ended after {self._deadline_s:g} s (`runtime.update_seconds`): the trainer is at "
                f"{self._doing}, {self._place()}. If it needs longer, raise `runtime.update_seconds`"
            )
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Wait for what is running and end the thread; one that hangs is left behind."""
        self._work.put(None)
        if not self._hangs:
            self._thread.join(min(self._deadline_s, threading.TIMEOUT_MAX))

    def _place(self) -> str:
        """Where in the code the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "which has ended"
        last = traceback.extract_stack(frame)[-1]
        return f"in `{last.name}` ({last.filename}:{last.lineno})"

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while (work := self._work.get()) is not None:
            call, future, self._doing = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            self._doing = "nothing"
