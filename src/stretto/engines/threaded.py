"""An engine in a thread of its own: a step-based core behind the asynchronous protocol.

Commands pass through one queue and are applied between steps. Results go back with one wake-up of the caller's loop a
round. Without work the thread blocks on the queue. If the core fails, every pending call and every later one raises.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from stretto.engines.protocol import Capabilities
from stretto.errors import AbortedError, EngineError, StrettoError, SuspendedError
from stretto.types import Capacity, Completion, EngineStats, Receipt, Request, Suspended, Weights, WeightsRef

log = logging.getLogger(__name__)

CLOSE_S = 60.0  # time for the running step to end when an engine is closed
CLOSE_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that the core gave up on, while the core itself continues."""

    id: int
    error: StrettoError


class SteppedEngine(Protocol):
    """A synchronous engine; one thread calls everything."""

    @property
    def capacity(self) -> Capacity: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def has_work(self) -> bool:
        """True if another step would do anything."""
        ...

    def step(self) -> Sequence[Completion | Failed]:
        """Makes one token for every running trajectory; returns those that have ended."""
        ...

    def add(self, work: Request | Suspended) -> None: ...
    def load(self, weights: Weights) -> Receipt | None: ...
    def swap(self, old: int, weights: Weights) -> None: ...
    def unload(self, version: int) -> None: ...
    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]: ...
    def abort(self, ids: Sequence[int]) -> list[int]:
        """Throws trajectories away; returns those that were there."""
        ...

    def shrink(self, kv_tokens: int) -> None:
        """Reduces the cache to so many tokens of context; trajectories continue."""
        ...

    def report(self) -> EngineStats: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A command to apply between two steps, and the caller's future. With `trajectory` it waits for that one's end."""

    apply: Callable[[SteppedEngine], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    trajectory: int | None = None


_Answer = tuple[_Call, Any, BaseException | None]


class ThreadedEngine:
    """The `Engine` protocol over a core that is made and used in one thread.

    `threads` is the number of threads that torch may use inside the core; None leaves it as it is and does not import
    torch. `longest` is the most tokens, prompt and completion, that a trajectory is expected to have: `shrink` keeps
    room for it, and for any longer one that was requested. None: as many as the core's context allows.
    """

    def __init__(
        self,
        make: Callable[[], SteppedEngine],
        *,
        threads: int | None = None,
        name: str = "engine",
        longest: int | None = None,
    ) -> None:
        self._name, self._threads, self._longest = name, threads, longest
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # The engine's thread alone uses these three.
        self._inbox: deque[_Call | None] = deque()  # taken from the queue and not applied yet
        self._pending: dict[int, _Call] = {}  # trajectory -> the call that waits for its end
        self._answers: list[_Answer] = []  # to deliver at the end of this round
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._gate = threading.Lock()  # a call is either queued before the end, or refused after it
        started: SimpleQueue[SteppedEngine | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(make, started), name=name, daemon=True)
        self._thread.start()
        core = started.get()
        if isinstance(core, BaseException):
            self._thread.join()
            raise core
        self.capacity, self.capabilities = core.capacity, core.capabilities
        self._load = core.report()

    # -- the loop's side -----------------------------------------------------------------------------------------------

    def report(self) -> EngineStats:
        """Returns the load and the counters at the latest step boundary."""
        return self._load

    async def load(self, weights: Weights | WeightsRef) -> Receipt | None:
        fetched = weights if isinstance(weights, Weights) else await asyncio.to_thread(weights.fetch)
        receipt: Receipt | None = await self._call(lambda core: core.load(fetched))
        return receipt

    async def swap(self, old: int, weights: Weights | WeightsRef) -> None:
        fetched = weights if isinstance(weights, Weights) else await asyncio.to_thread(weights.fetch)
        await self._call(lambda core: core.swap(old, fetched))

    async def unload(self, version: int) -> None:
        await self._call(lambda core: core.unload(version))

    async def generate(self, request: Request) -> Completion:
        return await self._follow(request, request.id)

    async def resume(self, suspended: Suspended) -> Completion:
        return await self._follow(suspended, suspended.request.id)

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        result: list[Suspended] = await self._call(lambda core: self._suspend(core, list(ids), kv))
        return result

    async def abort(self, ids: Sequence[int]) -> None:
        await self._call(lambda core: self._abort(core, list(ids)))

    async def shrink(self, share: float) -> int:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"`share = {share}` of the KV cache to keep must be above 0 and at most 1")
        kept: int = await self._call(lambda core: self._shrink(core, share))
        return kept

    async def close(self) -> None:
        with self._gate:
            self._closed.set()
            self._calls.put(None)
        deadline = time.monotonic() + CLOSE_S
        while self._thread.is_alive():  # polled: a join in another thread would hang as long as this one
            if time.monotonic() > deadline:
                # It cannot be killed. As a daemon it does not keep the process from ending.
                log.warning("engine `%s` does not end: its thread is abandoned with its memory", self._name)
                return
            await asyncio.sleep(CLOSE_EVERY_S)

    async def _follow(self, work: Request | Suspended, trajectory: int) -> Completion:
        if self._longest is not None:  # before it is queued, so that a later `shrink` takes it into account
            request = work.request if isinstance(work, Suspended) else work
            self._longest = max(self._longest, len(request.prompt) + request.sampling.max_tokens)
        call = self._begin(lambda core: core.add(work), trajectory)
        try:
            result: Completion = await call.future
        except asyncio.CancelledError:
            # The caller is gone; without an abort the trajectory would hold a row to its end.
            with self._gate:
                if not self._closed.is_set():
                    future = call.loop.create_future()
                    future.add_done_callback(lambda done: done.exception())  # retrieved, or asyncio would warn
                    self._calls.put(_Call(lambda core: self._give_up(core, call), call.loop, future))
            raise
        return result

    async def _call(self, apply: Callable[[SteppedEngine], Any]) -> Any:
        return await self._begin(apply).future

    def _begin(self, apply: Callable[[SteppedEngine], Any], trajectory: int | None = None) -> _Call:
        loop = asyncio.get_running_loop()
        call = _Call(apply, loop, loop.create_future(), trajectory)
        with self._gate:
            if self._closed.is_set():
                raise self._over()
            self._calls.put(call)
        return call

    def _over(self) -> EngineError:
        error = EngineError(f"engine `{self._name}` is closed")
        if self._failure is not None:
            error = EngineError(f"engine `{self._name}` failed: {type(self._failure).__name__}: {self._failure}")
            error.__cause__ = self._failure
        return error

    # -- the engine's side ---------------------------------------------------------------------------------------------

    def _main(self, make: Callable[[], SteppedEngine], started: SimpleQueue[SteppedEngine | BaseException]) -> None:
        try:
            if self._threads is not None:
                import torch

                torch.set_num_threads(self._threads)
            core = make()
        except BaseException as error:
            started.put(error)
            return
        started.put(core)
        try:
            self._run(core)
        except BaseException as error:
            self._failure = error
        finally:
            self._end()
            core.close()

    def _run(self, core: SteppedEngine) -> None:
        while True:
            try:
                self._take(block=not core.has_work)
                while self._inbox:
                    call = self._inbox[0]
                    if call is None:
                        return
                    self._apply(core, call)
                    self._inbox.popleft()
                if core.has_work:
                    for ended in core.step():
                        self._settle(ended.id, ended)
                self._load = core.report()
            finally:
                answers, self._answers = self._answers, []
                self._deliver(answers)

    def _take(self, *, block: bool) -> None:
        if block:
            self._inbox.append(self._calls.get())
        while True:
            try:
                self._inbox.append(self._calls.get_nowait())
            except Empty:
                return

    def _apply(self, core: SteppedEngine, call: _Call) -> None:
        try:
            result = call.apply(core)
        except EngineError:
            raise
        except StrettoError as error:
            self._answers.append((call, None, error))
            return
        if call.trajectory is None:
            self._answers.append((call, result, None))
        else:
            self._pending[call.trajectory] = call

    def _settle(self, trajectory: int, ended: Completion | Failed | StrettoError) -> None:
        call = self._pending.pop(trajectory)
        if isinstance(ended, Failed):
            ended = ended.error
        if isinstance(ended, StrettoError):
            self._answers.append((call, None, ended))
        else:
            self._answers.append((call, ended, None))

    def _suspend(self, core: SteppedEngine, ids: list[int], kv: bool) -> list[Suspended]:
        taken = core.suspend(ids, kv=kv)
        for suspended in taken:
            self._settle(suspended.request.id, SuspendedError(f"trajectory {suspended.request.id} was suspended"))
        return taken

    def _abort(self, core: SteppedEngine, ids: list[int]) -> None:
        for gone in core.abort(ids):
            self._settle(gone, AbortedError(f"trajectory {gone} was aborted"))

    def _give_up(self, core: SteppedEngine, call: _Call) -> None:
        """Aborts the trajectory of a call, unless the call was refused and the id belongs to another call."""
        if call.trajectory is not None and self._pending.get(call.trajectory) is call:
            self._abort(core, [call.trajectory])

    def _shrink(self, core: SteppedEngine, share: float) -> int:
        """Shrinks the core to `share`, but not below the longest trajectory that may still be requested."""
        limit = core.capacity
        longest = limit.max_context if self._longest is None else min(self._longest, limit.max_context)
        kept = max(int(share * limit.kv_tokens), min(longest, limit.kv_tokens))
        if kept < limit.kv_tokens and core.capabilities.shrinks:
            core.shrink(kept)
        self.capacity = core.capacity
        return self.capacity.kv_tokens

    def _end(self) -> None:
        """Raises from all pending calls; every later call is refused."""
        with self._gate:
            self._closed.set()
            self._take(block=False)
        waiting = [call for call in self._inbox if call is not None] + list(self._pending.values())
        self._inbox.clear()
        self._pending.clear()
        self._deliver([(call, None, self._over()) for call in waiting])

    @staticmethod
    def _deliver(answers: list[_Answer]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
        for answer in answers:
            by_loop.setdefault(answer[0].loop, []).append(answer)
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, own)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                # The caller's loop has ended: nobody waits for the answer.


def _resolve(answers: list[_Answer]) -> None:
    for call, result, error in answers:
        if call.future.done():
            continue
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
