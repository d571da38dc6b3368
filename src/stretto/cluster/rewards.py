"""Rewards on a cluster: an actor with a pool of reward processes, on a machine with room.

The pool is that of a local run, with the same deadlines and checked frames, so a reward that hangs, dies or writes
nonsense fails alone. Messages between the actor and the driver are Ray's own pickles; the actor runs no code of the
reward. A worker sees the usual variables of its machine, and those of `task.pass_env` with the driver's values.

If the actor or its machine dies, another actor replaces it and scores again what had no score. That is not the fault of
a trajectory, and costs it none of its retries.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from stretto.cluster.actor_calls import ActorCalls, CallServer, ServingActor, idle_seconds, kill
from stretto.environments.reward_pool import RewardPool
from stretto.environments.reward_worker import Columns
from stretto.environments.sandbox import Limits
from stretto.environments.worker_process import START_S
from stretto.errors import RewardError, StrettoError, first_line

log = logging.getLogger(__name__)

PLACE_S = 300.0  # for a machine with room, and for the process to import what it needs
RESCORES = 3  # of one completion, each because its actor was lost
CLOSE_S = 10.0  # for an actor to end its reward processes
STARTS = 3  # attempts to start an actor, if it dies while it starts


class RewardActorLostError(StrettoError):
    """The actor that computed rewards is gone, or its machine is."""


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """The options of the `RewardPool`, wherever it runs."""

    spec: str
    workers: int
    deadline_s: float
    columns: Columns | None
    folder: str  # the driver's working directory, where its modules are
    passed: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of the driver that a reward sees
    sandbox: Limits | None = None
    strict_sandbox: bool = False


class RewardActor(ServingActor):
    """The actor. The driver calls `start` first and `close` last."""

    def __init__(self, options: RewardOptions, idle_s: float) -> None:
        self._options = options
        self._idle_s = idle_s
        self._lines: list[str] = []
        self._printed = asyncio.Event()
        self._pool: RewardPool

    async def start(self) -> None:
        """Starts the pool. Raises `RecipeError` if the function cannot be imported or called."""
        options = self._options
        if Path(options.folder).is_dir():  # the same machine, or a file system that is shared
            os.chdir(options.folder)
            sys.path.insert(0, options.folder)
        self._pool = RewardPool(
            options.spec,
            workers=options.workers,
            deadline_s=options.deadline_s,
            columns=options.columns,
            on_output=self._keep,
            extra_environment=options.passed,
            sandbox=options.sandbox,
            strict_sandbox=options.strict_sandbox,
        )
        await self._pool.start()
        handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "score": self._pool.score,
            "listen": self._listen,
        }
        self._server = CallServer(handlers, status=lambda: None, report_s=self._idle_s, idle_s=self._idle_s)

    async def close(self) -> None:
        """Ends the reward processes, which an actor that is killed would leave behind."""
        await self._pool.close()

    def _keep(self, line: str) -> None:
        self._lines.append(line)
        self._printed.set()

    async def _listen(self) -> list[str]:
        """Returns the lines that were printed since the last call, as soon as there is one."""
        await self._printed.wait()
        self._printed.clear()
        lines, self._lines = self._lines, []
        return lines


class RayRewards:
    """The `Rewards` of a cluster. For one event loop."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        said: Callable[[str], None],
        instance_seconds: float,
        notice: Callable[[str], None] = log.error,
    ) -> None:
        """`said` gets every line that the function prints. `notice` gets a sentence for every actor that is lost.

        An actor that does not answer for `instance_seconds` is lost.
        """
        self.replaced = 0  # actors that were lost
        self._options = options
        self._said = said
        self._seconds = instance_seconds
        self._notice = notice
        self._remote: ActorCalls | None = None
        self._listener: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def longest_s(self) -> float:
        """The longest that a reward takes if its actor is not lost on the way; if it is, twice as long."""
        deadline_s = self._options.deadline_s
        return deadline_s + max(1.0, deadline_s) + START_S

    async def start(self) -> None:
        """Starts the actor. Raises `RecipeError` if the function cannot be imported or called."""
        await self._ready(None)

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Returns the reward of one completion, or raises `RewardError`."""
        lost: ActorCalls | None = None
        for _ in range(RESCORES + 1):
            remote = await self._ready(lost)
            try:
                reward: float = await remote.call("score", prompt, completion, row, bounded=False)
                return reward
            except RewardActorLostError as error:
                lost = remote
                if self._closed:
                    raise RewardError(f"`{self._options.spec}` was stopped before it returned") from error
        raise RewardError(f"`{self._options.spec}` lost its process {RESCORES + 1} times while it computed one reward")

    async def close(self) -> None:
        """Ends the actor. Pending calls raise `RewardError`. Safe to call twice."""
        self._closed = True
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if (remote := self._remote) is not None and remote.failure is None:
            try:
                await asyncio.wait_for(remote.actor.close.remote(), CLOSE_S)
            except (RayError, TimeoutError) as error:
                log.warning("the actor of rewards did not end by itself: %s", type(error).__name__)
        if remote is not None:
            await remote.close()

    async def _ready(self, lost: ActorCalls | None) -> ActorCalls:
        """Returns the actor: another one if the last one is `lost`."""
        async with self._turn:
            if self._remote is not None and self._remote is not lost and self._remote.failure is None:
                return self._remote
            if self._closed:
                raise RewardError(f"`{self._options.spec}` was asked for a reward after it was stopped")
            if self._remote is not None:
                self.replaced += 1
                self._notice(f"{self._remote.failure}; another one replaces it")
                await self._remote.close()
            self._remote = await self._place()
            if self._listener is not None:
                self._listener.cancel()
            self._listener = asyncio.create_task(self._listen(self._remote), name="reward output")
            return self._remote

    async def _place(self) -> ActorCalls:
        """Starts an actor, again if it dies while it starts. Raises `RewardError` after `STARTS` attempts."""
        for attempt in range(STARTS):
            try:
                return await self._start()
            except (RayError, TimeoutError) as error:
                said = f"rewards could not be started on the cluster: {type(error).__name__}: {first_line(error)}"
                if attempt + 1 == STARTS or self._closed:
                    raise RewardError(said) from error
                self._notice(f"{said}; they are placed again")
        raise AssertionError("the last try returns or raises")

    async def _start(self) -> ActorCalls:
        idle_s = idle_seconds(self._seconds)
        actor = (
            ray.remote(RewardActor)
            .options(num_cpus=0, max_restarts=0, max_task_retries=0)
            .remote(self._options, idle_s)
        )
        try:
            await asyncio.wait_for(actor.start.remote(), PLACE_S + START_S)
        except BaseException as error:
            kill(actor)
            if isinstance(error, RayTaskError):
                raise error.cause from None
            raise
        return ActorCalls(actor, "the actor of rewards", deadline_s=self._seconds, make_error=RewardActorLostError)

    async def _listen(self, remote: ActorCalls) -> None:
        while True:
            try:
                lines = await remote.call("listen", bounded=False)
            except RewardActorLostError:
                return
            for line in lines:
                self._said(line)
