"""The host of worker processes on a cluster: an actor with a pool of them, on a machine with room.

Rewards (`rewards.py`) and episodes (`episodes.py`) have one each. The pool is that of a local run, with the same
deadlines and checked frames, so code of the user's that hangs, dies or writes nonsense fails alone. Messages between
the actor and the driver are Ray's own pickles; the actor runs no code of the user's. A worker sees the usual variables
of its machine, and those of `task.pass_env` with the driver's values.

If the actor or its machine dies, another actor replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from stretto.cluster.actor_calls import ActorCalls, CallServer, ServingActor, idle_seconds, kill
from stretto.environments.worker_process import START_S
from stretto.errors import RewardError, StrettoError, first_line

log = logging.getLogger(__name__)

PLACE_S = 300.0  # for a machine with room, and for the process to import what it needs
CLOSE_S = 10.0  # for an actor to end its processes
STARTS = 3  # attempts to start an actor, if it dies while it starts

Handlers = Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]


class HostLostError(StrettoError):
    """The actor that held worker processes is gone, or its machine is."""


class WorkerPool(Protocol):
    """The pool of processes in the actor."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...


class HostActor(ServingActor):
    """The actor. The driver calls `start` first and `close` last. A subclass makes the pool."""

    def __init__(self, options: Any, folder: str, idle_s: float) -> None:
        """`folder` is the driver's working directory, where its modules are."""
        self._options = options
        self._folder = folder
        self._idle_s = idle_s
        self._lines: list[str] = []
        self._printed = asyncio.Event()
        self._pool: WorkerPool

    def make_pool(self) -> tuple[WorkerPool, Handlers]:
        """Returns the pool, and the calls that the driver may make."""
        raise NotImplementedError

    async def start(self) -> None:
        """Starts the pool. Raises `RecipeError` if the user's code cannot be imported or called."""
        if Path(self._folder).is_dir():  # the same machine, or a file system that is shared
            os.chdir(self._folder)
            sys.path.insert(0, self._folder)
        self._pool, handlers = self.make_pool()
        await self._pool.start()
        handlers = {**handlers, "listen": self._listen}
        self._server = CallServer(handlers, status=lambda: None, report_s=self._idle_s, idle_s=self._idle_s)

    async def close(self) -> None:
        """Ends the worker processes, which an actor that is killed would leave behind."""
        await self._pool.close()

    def keep(self, line: str) -> None:
        """Keeps a line that a worker printed, for the driver."""
        self._lines.append(line)
        self._printed.set()

    async def _listen(self) -> list[str]:
        """Returns the lines that were printed since the last call, as soon as there is one."""
        await self._printed.wait()
        self._printed.clear()
        lines, self._lines = self._lines, []
        return lines


class WorkerHost:
    """The driver's side: one actor at a time. For one event loop."""

    def __init__(
        self,
        kind: type[HostActor],
        options: Any,
        folder: str,
        *,
        what: str,
        said: Callable[[str], None],
        instance_seconds: float,
        notice: Callable[[str], None] = log.error,
        start_s: float = START_S,
        gpus: float = 0.0,
    ) -> None:
        """`what` the actor is for, in the plural. `said` gets every line that its processes print.

        `notice` gets a sentence for every actor that is lost, which it is if it does not answer for `instance_seconds`.
        Its processes may take `start_s` to start, and have `gpus` of the cluster.
        """
        self.replaced = 0  # actors that were lost
        self.closed = False
        self._kind = kind
        self._options = options
        self._folder = folder
        self._what = what
        self._said = said
        self._seconds = instance_seconds
        self._notice = notice
        self._start_s = start_s
        self._gpus = gpus
        self._remote: ActorCalls | None = None
        self._listener: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def ready(self, lost: ActorCalls | None = None) -> ActorCalls:
        """Returns the actor: another one if the last one is `lost`. Raises `RewardError` if there is none."""
        async with self._turn:
            if self._remote is not None and self._remote is not lost and self._remote.failure is None:
                return self._remote
            if self.closed:
                raise RewardError(f"the actor of {self._what} was called after it was stopped")
            if self._remote is not None:
                self.replaced += 1
                self._notice(f"{self._remote.failure}; another one replaces it")
                await self._remote.close()
            self._remote = await self._place()
            if self._listener is not None:
                self._listener.cancel()
            self._listener = asyncio.create_task(self._listen(self._remote), name=f"output of {self._what}")
            return self._remote

    async def close(self) -> None:
        """Ends the actor. Safe to call twice."""
        self.closed = True
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if (remote := self._remote) is not None and remote.failure is None:
            try:
                await asyncio.wait_for(remote.actor.close.remote(), CLOSE_S)
            except (RayError, TimeoutError) as error:
                log.warning("the actor of %s did not end by itself: %s", self._what, type(error).__name__)
        if remote is not None:
            await remote.close()

    async def _place(self) -> ActorCalls:
        """Starts an actor, again if it dies while it starts. Raises `RewardError` after `STARTS` attempts."""
        for attempt in range(STARTS):
            try:
                return await self._start()
            except (RayError, TimeoutError) as error:
                cause = f"{type(error).__name__}: {first_line(error)}"
                said = f"{self._what} could not be started on the cluster: {cause}"
                if attempt + 1 == STARTS or self.closed:
                    raise RewardError(said) from error
                self._notice(f"{said}; they are placed again")
        raise AssertionError("the last try returns or raises")

    async def _start(self) -> ActorCalls:
        actor = (
            ray.remote(self._kind)
            .options(num_cpus=0, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)
            .remote(self._options, self._folder, idle_seconds(self._seconds))
        )
        try:
            await asyncio.wait_for(actor.start.remote(), PLACE_S + self._start_s)
        except BaseException as error:
            kill(actor)
            if isinstance(error, RayTaskError):
                raise error.cause from None
            raise
        name = f"the actor of {self._what}"
        return ActorCalls(actor, name, deadline_s=self._seconds, make_error=HostLostError)

    async def _listen(self, remote: ActorCalls) -> None:
        while True:
            try:
                lines = await remote.call("listen", bounded=False)
            except HostLostError:
                return
            for line in lines:
                self._said(line)
