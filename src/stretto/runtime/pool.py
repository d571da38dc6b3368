"""The seam between the loop and wherever rollout instances come from, and the pool of one process.

Contract:

- `add` makes an instance with an id that was never used before in this pool. It raises `EngineError` where none can be
  made, and by a deadline; the pool is then as it was before.
- `remove` ends an instance and forgets it, whatever state it is in, and is over by a deadline. An id that is not there
  is no error, so that one that is lost can be removed twice.
- `engines` are those that were made and not removed. Whether one of them still lives is not the pool's to say.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Protocol

from stretto.engines.protocol import Engine
from stretto.engines.threaded import Core, ThreadedEngine
from stretto.errors import EngineError, StrettoError

log = logging.getLogger(__name__)

MAKE_S = 600.0  # for an instance to be made: it may have to load a large model
CLOSE_S = 30.0  # for one that is being made when all of them are to end


class Pool(Protocol):
    """Makes and ends instances, for the loop's thread; no method blocks it."""

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The instances by their ids; a live view."""
        ...

    async def add(self) -> tuple[int, Engine]:
        """Make an instance."""
        ...

    async def remove(self, instance: int) -> None:
        """End an instance."""
        ...

    async def close(self) -> None:
        """End all of them. Safe to call twice."""
        ...


class FixedPool:
    """Instances that somebody else made; there are no others."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self._engines = dict(engines)

    @property
    def engines(self) -> Mapping[int, Engine]:
        return MappingProxyType(self._engines)

    async def add(self) -> tuple[int, Engine]:
        raise EngineError("there is no other instance: those that there are were made elsewhere")

    async def remove(self, instance: int) -> None:
        engine = self._engines.pop(instance, None)
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        await asyncio.gather(*(self.remove(instance) for instance in list(self._engines)))


class LocalPool:
    """Instances in one process: a core in a thread each, made in that thread by `make`.

    `threads` is how many threads torch may use in one of them, and `longest` the most tokens that a trajectory is
    expected to have. A thread that hangs cannot be killed: it is left behind with what it holds.
    """

    def __init__(self, make: Callable[[], Core], *, threads: int | None = None, longest: int | None = None) -> None:
        self._make = make
        self._threads, self._longest = threads, longest
        self._engines: dict[int, Engine] = {}
        self._next = 0
        self._turn = asyncio.Lock()  # one is made at a time: each needs memory of its own
        self._making: set[asyncio.Future[Engine]] = set()
        self._left = threading.Event()  # set when the pool has ended before all were made

    @property
    def engines(self) -> Mapping[int, Engine]:
        return MappingProxyType(self._engines)

    async def add(self) -> tuple[int, Engine]:
        instance, self._next = self._next, self._next + 1
        async with self._turn:
            making = self._begin(instance)
            self._making.add(making)
            await asyncio.wait({making}, timeout=MAKE_S)  # one that nobody waits for any more is ended by `close`
            if not making.done():
                raise EngineError(f"instance {instance} is not made after {MAKE_S:g} s: its thread is left behind")
            self._making.discard(making)
        engine = self._engines[instance] = making.result()
        return instance, engine

    def _begin(self, instance: int) -> asyncio.Future[Engine]:
        """Make an instance in a thread that keeps no process from ending should it hang."""
        made: Future[Engine] = Future()

        def work() -> None:
            try:
                engine = self._engine(instance)
            except BaseException as error:
                made.set_exception(error)
                return
            if self._left.is_set():  # nobody is there to end it
                asyncio.run(engine.close())
            else:
                made.set_result(engine)

        threading.Thread(target=work, name=f"making instance {instance}", daemon=True).start()
        return asyncio.wrap_future(made)

    def _engine(self, instance: int) -> Engine:
        name = f"instance {instance}"
        try:
            return ThreadedEngine(self._make, threads=self._threads, name=name, longest=self._longest)
        except Exception as error:
            said = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
            raise EngineError(f"{name} cannot be made: {said}") from error

    async def remove(self, instance: int) -> None:
        engine = self._engines.pop(instance, None)
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        making, self._making = self._making, set()
        late: set[asyncio.Future[Engine]] = set()
        if making:
            _, late = await asyncio.wait(making, timeout=CLOSE_S)
        if late:
            self._left.set()
            log.warning("%d instances are still being made: their threads are left behind", len(late))
        orphans = [each.result() for each in making - late if each.exception() is None]
        await asyncio.gather(
            *(engine.close() for engine in orphans), *(self.remove(instance) for instance in list(self._engines))
        )
