"""The trainer's thread: one worker with its own torch thread count, so that an update never blocks the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from stretto.errors import StrettoError, TrainerError
from stretto.training.trainer import Trainer
from stretto.types import Batch, UpdateReport, Weights

Result = TypeVar("Result")


class TrainerRole:
    """Runs a trainer in a thread of its own. Whatever it raises is a `TrainerError` that names the update."""

    def __init__(self, trainer: Trainer, threads: int) -> None:
        self.trainer = trainer
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        """One update, and a copy of the weights that it made: version `batch.update + 1`."""

        def work() -> tuple[UpdateReport, Weights]:
            return self.trainer.update(batch), self.trainer.weights(batch.update + 1)

        try:
            return await self.call(work)
        except StrettoError:
            raise
        except Exception as error:
            raise TrainerError(f"update {batch.update} failed: {type(error).__name__}: {error}") from error

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run something in the trainer's thread, after what is already there."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for what is running and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
