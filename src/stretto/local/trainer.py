"""The `TrainerBackend` of one process: a trainer in a thread.

If an update runs out of memory, it is tried again: first with micro-batches of half the size, up to `HALVINGS` times,
then with more memory, of which the engines give back a part of their KV caches, up to `RETRIES` times. That is safe
because an update that raises has changed nothing, or raises a `TrainerError`, which is not tried again. Later updates
keep the smaller micro-batches. The size is a metric of each update, so that training a run again uses the same; so is
that it was lowered, so that a resumed run does not run out of memory again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from stretto.engines.native.capture_lock import CAPTURE, release_cached
from stretto.engines.protocol import Engine
from stretto.errors import EngineError, RunError, StalledError, StrettoError, TrainerError, describe, first_line
from stretto.training.trainer import Trainer
from stretto.types import Batch, UpdateReport, Weights, WeightsRef

log = logging.getLogger(__name__)

Result = TypeVar("Result")

HALVINGS = 2  # of the micro-batch of an update that ran out of memory
RETRIES = 3  # of such an update, after that
CAPTURING = "stream is capturing"  # in CUDA's error for what is not permitted then
KEPT_SHARE = 0.7  # of the KV cache, at each retry


class ThreadedTrainer:
    """A `TrainerBackend` over a trainer that lives in one thread.

    No call waits for that thread longer than `deadline_s`. A thread cannot be killed, so one that hangs is left behind:
    it is a daemon, and does not keep the process from ending.

    Weights that are returned are complete: on CUDA the trainer's stream was synchronized, so any stream may read them.
    `engines` share the trainer's device. Each has `engine_s` to give memory back; one that does not, or is lost, is
    skipped. `notice` gets a sentence whenever memory was given back. `is_warm`: the trainer has compiled what updates
    need (`training/warm_up.py`).
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
        is_warm: bool = False,
    ) -> None:
        self.trainer = trainer
        self.kv_given_back = 0  # tokens of KV cache that the engines gave up for updates
        self._threads = threads
        self._deadline_s = deadline_s
        self._engine_s = engine_s
        self._engines = engines
        self._notice = notice
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any], str] | None] = SimpleQueue()
        self._lowered: int | None = None  # `micro_tokens`, smaller than the trainer's own, after running out of memory
        self._doing = "nothing"
        self._hangs = False
        self._has_compiled = is_warm
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        """Trains one update. Returns its report and a copy of the new weights: version `batch.update + 1`."""
        name, report = f"update {batch.update}", list[UpdateReport]()
        given_before = self.kv_given_back
        if batch.micro_tokens is None:
            batch = replace(batch, micro_tokens=self._lowered, lowered=self._lowered is not None)
        elif batch.lowered and batch.micro_tokens < (self._lowered or self.trainer.micro_tokens or 0):
            self._lowered = batch.micro_tokens
            self._notice(
                f"micro-batches have at most {self._lowered:,} tokens: {name} ran out of memory with more, before"
            )

        def work() -> Weights | str:
            try:
                if not report:  # else the update was done, and only the copy ran out of memory
                    report.append(self._update(batch))
                return self._weights(batch.update + 1)
            except torch.OutOfMemoryError as error:
                # As text: the exception would keep alive what the update had allocated.
                return _reason(error)

        try:
            attempts = RETRIES + 1
            for attempt in itertools.count(1):
                made = await self.call(work, name)
                if isinstance(made, Weights):
                    return report[0], made
                smaller = None if report else self.trainer.smaller_micro_batches(batch)
                if smaller is not None and attempts <= RETRIES + HALVINGS:
                    attempts += 1
                    self._lowered = min(smaller, self._lowered or smaller)
                    batch = replace(batch, micro_tokens=smaller, lowered=True)
                    await self.call(_release_cached, f"releasing memory for {name}")
                    told = f"micro-batches have at most {smaller:,} tokens from now on"
                    self._notice(f"{name} ran out of memory ({made}): {told}; try {attempt + 1} of {attempts}")
                elif attempt < attempts:
                    await self._make_room(name, made, attempt, attempts)
                else:
                    break
        except StrettoError:
            raise
        except Exception as error:
            raise TrainerError(f"{name} failed: {describe(error)}") from error
        if self.kv_given_back > given_before:
            room = f"although the engine gave the memory of {self.kv_given_back - given_before:,} tokens of KV back"
        else:
            room = "and no engine has KV to give back: what is kept is what the longest trajectory needs"
        raise TrainerError(
            f"{name} ran out of memory {attempts} times, {room}: {made}. Lower `training.micro_tokens`, "
            "`rollout.max_tokens` or `rollout.rows`"
        )

    async def weights(self, version: int) -> Weights:
        """Returns a copy of the weights that the trainer holds."""
        return await self.call(lambda: self._weights(version), f"taking the weights of version {version}")

    async def base_checksum(self) -> str | None:
        """Returns the checksum of the weights that the adapters belong to."""
        return await self.call(self.trainer.base_checksum, "taking the checksum of the base")

    async def save(self, folder: Path) -> None:
        """Writes the state that the trainer has after all earlier calls.

        Only the copy takes the trainer's time; later calls continue while it is written. Raises `RunError` if it cannot
        be written; the trainer is unchanged then.
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
            said = f"{type(error).__name__}: {_reason(error)}"
            raise RunError(f"the trainer's state cannot be written to `{folder}`: {said}") from error

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        await self.call(lambda: self.trainer.load(folder), "loading the trainer")

    async def adopt(self, weights: Weights | WeightsRef) -> None:
        """Sets the weights of the policy."""
        fetched = weights if isinstance(weights, Weights) else await asyncio.to_thread(weights.fetch)
        await self.call(lambda: self.trainer.adopt(fetched), f"adopting the weights of version {weights.version}")

    async def export(self, folder: Path) -> None:
        """Writes the policy for others to load."""
        await self.call(lambda: self.trainer.export(folder), "exporting the policy")

    def _update(self, batch: Batch) -> UpdateReport:
        """Runs an update, and keeps engines from capturing graphs if it compiles.

        The first update on a GPU does, and its compiler synchronizes the whole device, which is an error while somebody
        captures. A later one may compile too, for a shape that needs a graph of its own; it is then run again.
        """
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        try:
            with CAPTURE if on_gpu and not self._has_compiled else nullcontext():
                report = self.trainer.update(batch)
        except RuntimeError as error:
            if not on_gpu or not self._has_compiled or CAPTURING not in str(error):
                raise
            log.info("update %d met the capture of a graph and is run again: %s", batch.update, _reason(error))
            with CAPTURE:
                report = self.trainer.update(batch)
        self._has_compiled = True
        return report

    def _weights(self, version: int) -> Weights:
        weights = self.trainer.weights(version)
        for device in {tensor.device for tensor in weights.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return weights

    async def _make_room(self, name: str, reason: str, attempt: int, attempts: int) -> None:
        """Has every engine give back part of its KV, and frees the memory that allocators only cache."""
        # All at once, and of a copy: instances come and go meanwhile.
        said = list(await asyncio.gather(*(self._shrink(engine) for engine in tuple(self._engines))))
        free = await self.call(_release_cached, f"releasing memory for {name}")
        if free is not None:
            said.append(f"{free / (1 << 30):.2f} GiB of the device are free now")
        told = "; ".join(said) or "there is no engine that could give any back"
        self._notice(f"{name} ran out of memory ({reason}): {told}; try {attempt + 1} of {attempts}")

    async def _shrink(self, engine: Engine) -> str:
        """Has one engine give back part of its KV. Returns a sentence on the result, also if the engine is lost."""
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
        """Runs `work` in the trainer's thread, after all earlier calls. Errors call it `name`.

        It is not tried again, because the next call is already waiting.
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
                f"{self._doing}, {self._position()}. If it needs longer, raise `runtime.update_seconds`"
            )
        except torch.OutOfMemoryError as error:
            raise TrainerError(
                f"{name} ran out of memory: {_reason(error)}. Lower `rollout.kv_tokens` or `rollout.staleness`"
            ) from error
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Waits for the running call and ends the thread. A thread that hangs is left behind."""
        self._work.put(None)
        if not self._hangs:
            self._thread.join(min(self._deadline_s, threading.TIMEOUT_MAX))

    def _position(self) -> str:
        """Returns where in the code the thread is, as text."""
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
        """Does one call. Its own frame, so that nothing of the call stays alive while the thread waits."""
        work = self._work.get()
        if work is None:
            return False
        call, future, self._doing = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # `SystemExit`, say: it must not end the driver
                made = TrainerError(f"{self._doing} ended with {type(error).__name__}: {error}")
                made.__cause__ = error
                future.set_exception(made)
        self._doing = "nothing"
        return True


def _reason(error: BaseException) -> str:
    return first_line(error).rstrip(".")


def _release_cached() -> int | None:
    """Frees the memory that allocators only cache. Returns the free bytes of the device, or None without one."""
    release_cached()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.mem_get_info()[0])
