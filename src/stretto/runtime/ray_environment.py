"""Rewards on a cluster: a pool of reward processes on whichever machine has room, behind an actor.

The pool is the one of a local run, with its deadlines, so a reward that hangs or dies fails alone. Where the whole
machine dies, another takes its place and scores again what had no score: that is no fault of the trajectory's, and
costs it none of its retries.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from stretto.environments.reward_worker import Columns
from stretto.environments.rewards import START_S, RewardPool
from stretto.errors import RewardError, StrettoError
from stretto.runtime.ray_mail import Answer, Message, Remote, Served, end, idle_seconds

log = logging.getLogger(__name__)

PLACE_S = 300.0  # for a machine, and for the process to import what it needs
MOVES = 3  # machines that one reward may lose
STARTS = 3  # tries of a host, where it dies before it has started


class LostHostError(StrettoError):
    """The machine, or the process, that rewards were computed in is gone."""


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """What a `RewardPool` is made with, wherever it runs."""

    spec: str
    workers: int
    deadline_s: float
    columns: Columns | None
    folder: str  # the driver's working directory, where its modules are


class RewardHost:
    """The actor."""

    def __init__(self, options: RewardOptions, idle_s: float) -> None:
        self._options = options
        self._idle_s = idle_s
        self._lines: list[str] = []
        self._spoken = asyncio.Event()
        self._pool: RewardPool
        self._served: Served

    async def start(self) -> None:
        """Start the pool; raises `RecipeError` for a function that cannot be imported or called."""
        options = self._options
        if Path(options.folder).is_dir():  # the same machine, or a file system that is shared
            os.chdir(options.folder)
            sys.path.insert(0, options.folder)
        self._pool = RewardPool(
            options.spec,
            workers=options.workers,
            deadline_s=options.deadline_s,
            columns=options.columns,
            said=self._said,
        )
        await self._pool.start()
        handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "score": self._pool.score,
            "listen": self._listen,
        }
        self._served = Served(handlers, status=lambda: None, every_s=self._idle_s, idle_s=self._idle_s)

    async def deliver(self, messages: Sequence[Message]) -> None:
        """Mail from the driver."""
        self._served.deliver(messages)

    async def collect(self, acknowledged: Sequence[int]) -> tuple[list[Answer], Any]:
        """Mail to the driver."""
        return await self._served.collect(acknowledged)

    async def close(self) -> None:
        """Kill the workers, which an actor that is simply killed would leave behind."""
        await self._pool.close()

    def _said(self, line: str) -> None:
        self._lines.append(line)
        self._spoken.set()

    async def _listen(self) -> list[str]:
        """What was printed since the last time, once something was."""
        await self._spoken.wait()
        self._spoken.clear()
        lines, self._lines = self._lines, []
        return lines


class RayRewards:
    """A `RewardPool` on the cluster. For one event loop."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        said: Callable[[str], None],
        instance_seconds: float,
        notice: Callable[[str], None] = log.error,
    ) -> None:
        """`said` is told every line that the function prints; a host that is silent for `instance_seconds` is lost.

        `notice` is told, in words, of every host that is lost.
        """
        self.replaced = 0  # hosts that were lost
        self._options = options
        self._said = said
        self._seconds = instance_seconds
        self._notice = notice
        self._host: Remote | None = None
        self._listener: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def longest_s(self) -> float:
        """After so long at most a reward ends, if its host is not lost on the way; if it is, after twice that."""
        deadline_s = self._options.deadline_s
        return deadline_s + max(1.0, deadline_s) + START_S

    async def start(self) -> None:
        """Find a place and start there; a function that cannot be imported or called is a `RecipeError`."""
        await self._ready(None)

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The reward of one completion, or a `RewardError` that says what went wrong."""
        lost: Remote | None = None
        for _ in range(MOVES + 1):
            host = await self._ready(lost)
            try:
                reward: float = await host.call("score", prompt, completion, row, bounded=False)
                return reward
            except LostHostError as error:
                lost = host
                if self._closed:
                    raise RewardError(f"`{self._options.spec}` was stopped before it returned") from error
        raise RewardError(f"`{self._options.spec}` lost {MOVES + 1} machines while it computed one reward")

    async def close(self) -> None:
        """End the host. Pending calls raise `RewardError`. Safe to call twice."""
        self._closed = True
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if (host := self._host) is not None and host.failure is None:
            try:
                await asyncio.wait_for(_result(host.actor.close.remote()), 10.0)
            except (RayError, TimeoutError) as error:
                log.warning("the reward's host did not end by itself: %s", type(error).__name__)
        if host is not None:
            await host.close()

    async def _ready(self, lost: Remote | None) -> Remote:
        """The host; another one where it is `lost`."""
        async with self._turn:
            if self._host is not None and self._host is not lost and self._host.failure is None:
                return self._host
            if self._closed:
                raise RewardError(f"`{self._options.spec}` was asked for a reward after it was stopped")
            if self._host is not None:
                self.replaced += 1
                self._notice(f"{self._host.failure}; another takes its place")
                await self._host.close()
            self._host = await self._place()
            if self._listener is not None:
                self._listener.cancel()
            self._listener = asyncio.create_task(self._listen(self._host), name="reward output")
            return self._host

    async def _place(self) -> Remote:
        """Start a host. One that dies before it has started is tried elsewhere; at last, `RewardError`."""
        for attempt in range(STARTS):
            try:
                return await self._start()
            except (RayError, TimeoutError) as error:
                said = f"rewards could not be started on the cluster: {type(error).__name__}: {_first_line(error)}"
                if attempt + 1 == STARTS or self._closed:
                    raise RewardError(said) from error
                self._notice(f"{said}; they are placed again")
        raise AssertionError("the last try returns or raises")

    async def _start(self) -> Remote:
        idle_s = idle_seconds(self._seconds)
        actor = (
            ray.remote(RewardHost).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote(self._options, idle_s)
        )
        try:
            await asyncio.wait_for(_result(actor.start.remote()), PLACE_S + START_S)
        except BaseException as error:
            end(actor)
            if isinstance(error, RayTaskError):
                raise error.cause from None
            raise
        return Remote(actor, "the host of rewards", deadline_s=self._seconds, lost=LostHostError)

    async def _listen(self, host: Remote) -> None:
        while True:
            try:
                lines = await host.call("listen", bounded=False)
            except LostHostError:
                return
            for line in lines:
                self._said(line)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


async def _result(reference: Any) -> Any:
    return await reference
