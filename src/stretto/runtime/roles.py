"""The trainer's seat: what the loop asks of whoever trains, wherever that runs; and a thread that takes it.

An update that finds no memory is made again with more of it: the engines give part of their KV back, three times at
most. That is safe because an update that raises has changed nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from stretto.engines.native.capture import CAPTURE, release_cached
from stretto.engines.protocol import Engine
from stretto.errors import EngineError, RunError, StalledError, StrettoError, TrainerError
from stretto.training.trainer import Trainer
from stretto.types import Batch, UpdateReport, Weights

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MORE_TRIES = 3  # of an update that ran out of memory
KEPT_SHARE = 0.7  # of the KV cache, each time


class TrainerSeat(Protocol):
    """One policy in training, for the loop's thread. Every method is over by a deadline, whoever does not answer.

    What is asked for is done in the order of the calls, one after the other, so a state that is saved between two
    updates is that of the version between them. An update that fails raises a `StrettoError` that names it.
    """

    @property
    def kv_given_back(self) -> int:
        """Tokens of the engines' KV caches that updates needed the memory of."""
        ...

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        """One update, and a copy of the weights that it made: version `batch.update + 1`."""
        ...

    async def weights(self, version: int) -> Weights:
        """A copy of the weights that the trainer holds, which are those of `version`."""
        ...

    async def base_checksum(self) -> str | None:
        """Of the frozen weights that the policy's adapters belong to; None: every weight is trained."""
        ...

    async def save(self, folder: Path) -> None:
        """Write everything that decides what later updates do; `load` of any seat of the same policy reads it."""
        ...

    async def load(self, folder: Path) -> None:
        """Take over what `save` wrote: later updates are then the same."""
        ...

    async def adopt(self, weights: Weights) -> None:
        """Make the policy the one that `weights` are, of the version that it is at. The optimizer stays as it is.

        Where it is that one already, nothing changes. Raises `TrainerError` for another version or other tensors.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Write the policy for others to load: a Hugging Face model folder, or a PEFT adapter folder."""
        ...

    def close(self) -> None:
        """End what runs. Safe to call twice, and after a failure."""
        ...


class TrainerRole:
    """The seat of a trainer in a thread of its own. Whatever it raises is a `TrainerError` that names the update.

    Nothing waits for that thread longer than `deadline_s`. It cannot be killed, so after that it is left to itself: it
    is a daemon, and keeps no process from ending.

    Weights that it hands over are whole: on CUDA the trainer's stream has been waited for, so any other stream may read
    them. `engines` share the trainer's device, and have `engine_s` to give memory back: one that does not, or is lost,
    is left out. `notice` is told, in words, whenever they gave memory back.
    """

    def __init__(
        self,
        trainer: Trainer,
        threads: int,
        *,
        deadline_s: float,
        engine_s: float = 120.0,
        engines: Collection[Engine] = (),
        notice: Callable[[str], None] = log.warning,
    ) -> None:
        self.trainer = trainer
        self.kv_given_back = 0  # tokens of the KV caches that updates needed the memory of
        self._threads = threads
        self._deadline_s = deadline_s
        self._engine_s = engine_s
        self._engines = engines
        self._notice = notice
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any], str] | None] = SimpleQueue()
        self._doing = "nothing"
        self._hangs = False
        self._has_compiled = False
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        """One update, and a copy of the weights that it made: version `batch.update + 1`."""
        name, report = f"update {batch.update}", list[UpdateReport]()
        given_before = self.kv_given_back

        def work() -> Weights | str:
            try:
                if not report:  # else it was done, and only the copy found no memory
                    with self._alone():
                        report.append(self.trainer.update(batch))
                    self._has_compiled = True
                return self._weights(batch.update + 1)
            except torch.OutOfMemoryError as error:
                # In words: the exception itself would keep everything alive that the update had made.
                return _first_line(error)

        try:
            for attempt in range(MORE_TRIES + 1):
                made = await self.call(work, name)
                if isinstance(made, Weights):
                    return report[0], made
                if attempt < MORE_TRIES:
                    await self._make_room(name, made, attempt + 1)
        except StrettoError:
            raise
        except Exception as error:
            raise TrainerError(f"{name} failed: {type(error).__name__}: {error}") from error
        if self.kv_given_back > given_before:
            room = f"although the engine gave the memory of {self.kv_given_back - given_before:,} tokens of KV back"
        else:
            room = "and no engine has KV to give back: what is kept is what the longest trajectory needs"
        raise TrainerError(
            f"{name} ran out of memory {MORE_TRIES + 1} times, {room}: {made}. Lower `training.micro_tokens`, "
            "`rollout.max_tokens` or `rollout.rows`"
        )

    async def weights(self, version: int) -> Weights:
        """A copy of the weights that the trainer holds."""
        return await self.call(lambda: self._weights(version), f"taking the weights of version {version}")

    async def base_checksum(self) -> str | None:
        """Of the weights that its adapters belong to."""
        return await self.call(self.trainer.base_checksum, "taking the checksum of the base")

    async def save(self, folder: Path) -> None:
        """Write the trainer's state, as it is when all that was asked for before is done.

        Only the copy takes the trainer's time; what is asked for next goes on while it is written. Raises `RunError`
        where it cannot be written: the trainer itself is as it was.
        """
        write = await self.call(self.trainer.capture, "copying the trainer's state")
        try:
            await asyncio.wait_for(asyncio.to_thread(write, folder), self._deadline_s)
        except TimeoutError:
            raise RunError(
                f"the trainer's state is not written to `{folder}` after {self._deadline_s:g} s "
                "(`runtime.update_seconds`)"
            ) from None
        except Exception as error:
            said = f"{type(error).__name__}: {_first_line(error)}"
            raise RunError(f"the trainer's state cannot be written to `{folder}`: {said}") from error

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        await self.call(lambda: self.trainer.load(folder), "loading the trainer")

    async def adopt(self, weights: Weights) -> None:
        """Make the policy the one that `weights` are."""
        await self.call(lambda: self.trainer.adopt(weights), f"adopting the weights of version {weights.version}")

    async def export(self, folder: Path) -> None:
        """Write the policy for others to load."""
        await self.call(lambda: self.trainer.export(folder), "exporting the policy")

    def _alone(self) -> AbstractContextManager[object]:
        """The first update on a GPU compiles, and its compiler waits for the whole device: no engine captures then."""
        compiles = not self._has_compiled and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return CAPTURE if compiles else nullcontext()

    def _weights(self, version: int) -> Weights:
        weights = self.trainer.weights(version)
        for device in {tensor.device for tensor in weights.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return weights

    async def _make_room(self, name: str, reason: str, attempt: int) -> None:
        """Have every engine give part of its KV back, and hand the memory from the allocator's caches to all."""
        # All at once, as they were when it was asked: instances come and go meanwhile.
        said = list(await asyncio.gather(*(self._shrink(engine) for engine in tuple(self._engines))))
        free = await self.call(_release_cached, f"releasing memory for {name}")
        if free is not None:
            said.append(f"{free / (1 << 30):.2f} GiB of the device are free now")
        told = "; ".join(said) or "there is no engine that could give any back"
        self._notice(f"{name} ran out of memory ({reason}): {told}; try {attempt + 1} of {MORE_TRIES + 1}")

    async def _shrink(self, engine: Engine) -> str:
        """Have one engine give part of its KV back; what came of it, in words. Who is lost is not for the trainer."""
        before = engine.capacity.kv_tokens
        try:
            kept = await asyncio.wait_for(engine.shrink(KEPT_SHARE), self._engine_s)
        except TimeoutError:
            return f"an engine has not given any back after {self._engine_s:g} s (`runtime.instance_seconds`)"
        except EngineError as error:
            return f"an engine that is lost gives none back ({error})"
        self.kv_given_back += before - kept
        if kept < before:
            return f"the engine keeps {kept:,} of {before:,} tokens of KV"
        return f"the engine has no KV to give back, its longest trajectory needs all {kept:,} tokens"

    async def call(self, work: Callable[[], Result], name: str) -> Result:
        """Run something in the trainer's thread, after what is already there; `name` is what errors call it.

        It is not tried again, because whatever waits behind it comes next.
        """
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
        except torch.OutOfMemoryError as error:
            raise TrainerError(
                f"{name} ran out of memory: {_first_line(error)}. Lower `rollout.kv_tokens` or `rollout.staleness`"
            ) from error
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
        while self._next():
            pass

    def _next(self) -> bool:
        """Do one thing. A frame of its own, so that nothing of what was made stays alive while the thread waits."""
        work = self._work.get()
        if work is None:
            return False
        call, future, self._doing = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        self._doing = "nothing"
        return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _release_cached() -> int | None:
    """Free what only caches hold; the bytes of the device that are free then, where there is one."""
    release_cached()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.mem_get_info()[0])
