"""One rollout instance as a run sees it: calls to its engine, its progress, and its record once it is gone.

A call may end in three ways: the engine answers, the engine raises, or the instance is lost meanwhile, which raises the
`EngineError` that it was lost with. The loop (`run/instance_membership.py`) and evaluations outside of it
(`run/idle_evaluation.py`) watch the progress of an instance with the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from stretto import clock
from stretto.engines.protocol import Engine
from stretto.errors import ChecksumError, EngineError, LostObjectError, VersionNotResidentError
from stretto.types import EngineStats

T = TypeVar("T")

CHECK_EVERY_S = 1.0  # between two checks of the progress, at most


class Instance:
    """An instance that takes part in a run, or took part. For the loop's thread only."""

    def __init__(self, id: int, engine: Engine, *, deadline_s: float) -> None:
        """`deadline_s`: for an answer to `call_in_order`, and without progress while there is work."""
        self.id = id
        self.joined_at, self.left_at = clock.now(), math.inf
        self.error: EngineError | None = None  # why it was lost
        self.leaving = False  # it was asked to leave
        self.leaving_decided = asyncio.Event()  # it left or was lost, or the core needs it after all
        self._engine: Engine | None = engine  # None once it is gone
        self._last_report: EngineStats | None = None  # once it is gone
        self._deadline_s = deadline_s
        self._in_order = asyncio.Lock()
        self._limits: set[asyncio.Timeout] = set()  # of the calls that it has not answered
        self._num_generating = 0  # those of them that end with tokens
        self._progress: tuple[int, ...] = ()  # what it had done at the last check
        self._progress_at = time.monotonic()  # when that last changed, or it had no work

    @property
    def is_gone(self) -> bool:
        """True if it was released, or is lost."""
        return self._engine is None

    def report(self) -> EngineStats:
        """Returns what it is doing and has done, and from when to when it took part."""
        load = self._last_report if self._engine is None else self._engine.report()
        assert load is not None, "an instance that is gone has left its last report"
        return replace(load, since=self.joined_at, until=self.left_at)

    def end(self, error: EngineError | None = None) -> None:
        """Ends its part in the run: it is released, or lost with `error`. Every call in progress raises that.

        The engine is let go, and with it the memory that it holds.
        """
        self.error, self.left_at = error, clock.now()
        self._last_report, self._engine = self.report(), None
        self.leaving_decided.set()
        if error is not None:
            for limit in self._limits:
                limit.reschedule(asyncio.get_running_loop().time())

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(self, work: Callable[[Engine], Awaitable[T]], *, generates: bool = True) -> T:
        """Has the engine do something that takes as long as it takes. Raises `EngineError` once the instance is lost.

        `generates`: the answer is tokens, so the instance must make progress until it comes.
        """
        engine = self._engine
        if engine is None:
            raise self.error or EngineError(f"instance {self.id} has been released")
        if generates and not self._num_generating:
            self._progress_at = time.monotonic()
        limit = asyncio.timeout(None)
        self._num_generating += generates
        try:
            async with limit:
                self._limits.add(limit)
                result = await work(engine)
        except TimeoutError:
            if self.error is None:
                raise
        finally:
            self._num_generating -= generates
            self._limits.discard(limit)
        if self.error is not None:
            raise self.error  # an answer that came meanwhile is too late
        return result

    async def call_in_order(self, what: str, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Has the engine do something within the deadline, after whatever was called in order before.

        Raises `ChecksumError` if weights arrived damaged, `LostObjectError` if they exist nowhere any more, and
        `EngineError` for a late answer and for whatever else the engine raises.
        """
        async with self._in_order:
            limit = asyncio.timeout(self._deadline_s)
            try:
                async with limit:
                    return await self.call(work, generates=False)
            except (EngineError, ChecksumError, LostObjectError):
                raise
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    late = f"it has not answered `{what}` for {self._deadline_s:g} s (`runtime.instance_seconds`)"
                    raise EngineError(late) from None
                # It was asked for what it can do: if it refuses, it is not in the state that it reported.
                raise EngineError(f"it answered `{what}` with {type(error).__name__}: {error}") from error

    async def release(self) -> None:
        """Ends it after whatever was called in order before."""
        async with self._in_order:
            if not self.is_gone:
                self.end()

    # -- progress ------------------------------------------------------------------------------------------------------

    def check_progress(self, now: float, held_up_s: float, *, also: int = 0, idle_s: float = 0.0) -> EngineError | None:
        """Returns the error to lose it with, if it has work and has made no progress for too long.

        Progress is a step, a token, a prefill, or a change of `also`. `held_up_s` is time in which the caller's thread
        was held up itself: it does not count. While the engine reports no work, `idle_s` more are allowed.
        """
        load = self.report()
        progress = (load.steps, load.tokens, load.prefilled, also)
        busy = load.running or load.queued
        if progress != self._progress or not (self._num_generating or busy):
            self._progress, self._progress_at = progress, now
            return None
        self._progress_at += held_up_s
        if now - self._progress_at <= self._deadline_s + (0.0 if busy else idle_s):
            return None
        return EngineError(
            f"it has {max(self._num_generating, load.running + load.queued)} trajectories and has made no progress "
            f"for {self._deadline_s:g} s (`runtime.instance_seconds`)"
        )


async def unload_all(engine: Engine) -> None:
    """Unloads every version that an engine holds."""
    for version in engine.report().versions:
        with contextlib.suppress(VersionNotResidentError):  # it has unloaded that since its last report
            await engine.unload(version)


async def watch_progress(check: Callable[[float, float], None], deadline_s: float) -> None:
    """Calls `check` several times within every deadline, until it is cancelled.

    `check` gets the time, and the seconds in which this thread was held up since the last check.
    """
    pause = min(CHECK_EVERY_S, deadline_s / 4)
    checked_at = time.monotonic()
    while True:
        await asyncio.sleep(pause)
        now = time.monotonic()
        held_up_s, checked_at = max(0.0, now - checked_at - 2 * pause), now
        check(now, held_up_s)
