"""The instance pool of one process: an engine in a thread each. The contract is in `run/protocols.py`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from stretto.engines.protocol import Engine
from stretto.engines.threaded import SteppedEngine, ThreadedEngine
from stretto.errors import EngineError, describe
from stretto.run.pool_base import InstancePool

log = logging.getLogger(__name__)

START_S = 600.0  # for an instance to start: it may have to load a large model
CLOSE_S = 30.0  # for instances that are still starting when the pool is closed


class LocalPool(InstancePool):
    """Instances in one process, each made by `make` in its own thread.

    `threads` is the number of torch threads of an instance, and `longest` the most tokens that a trajectory is expected
    to have. A thread that hangs cannot be killed: it is left behind with what it holds.
    """

    def __init__(
        self, make: Callable[[], SteppedEngine], *, threads: int | None = None, longest: int | None = None
    ) -> None:
        super().__init__()
        self._make = make
        self._threads, self._longest = threads, longest
        self._turn = asyncio.Lock()  # one instance starts at a time: each needs memory while it does
        self._starting: set[asyncio.Future[Engine]] = set()
        self._abandoned = threading.Event()  # set if the pool was closed before all had started

    async def add(self) -> tuple[int, Engine]:
        instance = self._new_id()
        async with self._turn:
            starting = self._start(instance)
            self._starting.add(starting)
            await asyncio.wait({starting}, timeout=START_S)  # if this wait is cancelled, `close` ends the instance
            if not starting.done():
                raise EngineError(f"instance {instance} has not started after {START_S:g} s: its thread is left behind")
            self._starting.discard(starting)
        engine = self._engines[instance] = starting.result()
        return instance, engine

    def _start(self, instance: int) -> asyncio.Future[Engine]:
        """Starts an instance in a daemon thread, which does not keep the process from ending if it hangs."""
        made: Future[Engine] = Future()

        def work() -> None:
            try:
                engine = self._make_engine(instance)
            except BaseException as error:
                made.set_exception(error)
                return
            if self._abandoned.is_set():  # nobody else would end it
                asyncio.run(engine.close())
            else:
                made.set_result(engine)

        threading.Thread(target=work, name=f"start of instance {instance}", daemon=True).start()
        return asyncio.wrap_future(made)

    def _make_engine(self, instance: int) -> Engine:
        name = f"instance {instance}"
        try:
            return ThreadedEngine(self._make, threads=self._threads, name=name, longest=self._longest)
        except Exception as error:
            raise EngineError(f"{name} cannot be made: {describe(error)}") from error

    async def close(self) -> None:
        starting, self._starting = self._starting, set()
        late: set[asyncio.Future[Engine]] = set()
        if starting:
            _, late = await asyncio.wait(starting, timeout=CLOSE_S)
        if late:
            self._abandoned.set()
            log.warning("%d instances are still starting: their threads are left behind", len(late))
        orphans = [each.result() for each in starting - late if each.exception() is None]
        await asyncio.gather(super().close(), *(engine.close() for engine in orphans))
