"""What runs in the actor of a rollout instance: an engine in a thread, behind the mail of `ray_mail.py`.

Imported on the machine that the instance was placed on. It loads the model itself; versions come from the object store,
and the KV of a trajectory that is suspended goes there, from one instance to the next without passing the driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from stretto.engines.threaded import Core, ThreadedEngine
from stretto.errors import AbortedError, ChecksumError, LostObjectError, StrettoError, SuspendedError
from stretto.runtime.ray_mail import Answer, Message, Served
from stretto.runtime.ray_weights import KvReference, WeightsHandle, flat, pulled, shaped
from stretto.types import Capacity, Completion, Load, Suspended, Weights

log = logging.getLogger(__name__)

SWITCH_S = 1e-4  # the engine's thread and the actor's share one interpreter lock; see `runtime/run.py`
LOADS = 2  # tries of a copy into a slot, before the object itself is doubted


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """What an instance is made of, wherever it is placed."""

    make: Callable[[], Core]  # called there, in the engine's thread
    threads: int  # of torch
    longest: int | None  # tokens of the longest trajectory that is expected
    every_s: float  # between two reports while it is busy
    idle_s: float  # between two reports otherwise
    pull_s: float  # for an object to arrive


@dataclass(frozen=True, slots=True)
class Started:
    """What an instance says once it can be used."""

    capacity: Capacity
    load: Load
    node: str
    process: int


@dataclass(slots=True, eq=False)
class _Arrival:
    """A trajectory that is to go on here, while its KV is being pulled."""

    suspended: Suspended
    pull: asyncio.Future[Any]
    taken_back: StrettoError | None = None


class Instance:
    """The actor. Every method but the mail's two is called once."""

    def __init__(self, options: InstanceOptions) -> None:
        self._options = options
        self._engine: ThreadedEngine
        self._served: Served
        self._kv: dict[int, Any] = {}  # trajectory -> what was suspended with it, until the driver has asked for it
        self._arriving: dict[int, _Arrival] = {}  # trajectories that the engine is not given yet

    async def ready(self) -> None:
        """It has a process, on some machine."""

    async def start(self) -> Started:
        """Make the engine. Raises what that raises."""
        sys.setswitchinterval(SWITCH_S)
        options = self._options
        self._engine = await asyncio.to_thread(
            ThreadedEngine, options.make, threads=options.threads, name="engine", longest=options.longest
        )
        engine = self._engine
        self._served = Served(
            {
                "load": self._load,
                "swap": self._swap,
                "unload": engine.unload,
                "generate": engine.generate,
                "resume": self._resume,
                "suspend": self._suspend,
                "abort": self._abort,
                "shrink": engine.shrink,
            },
            status=lambda: (engine.report(), engine.capacity),
            every_s=options.every_s,
            idle_s=options.idle_s,
        )
        node = ray.get_runtime_context().get_node_id()
        return Started(engine.capacity, engine.report(), node, os.getpid())

    async def deliver(self, messages: Sequence[Message]) -> None:
        """Mail from the driver."""
        self._served.deliver(messages)

    async def collect(self, acknowledged: Sequence[int]) -> tuple[list[Answer], Any]:
        """Mail to the driver."""
        return await self._served.collect(acknowledged)

    async def take_kv(self, ids: Sequence[int]) -> Any:
        """The KV of trajectories that were suspended, an object each, after a first that only says that they are there.

        A task's results belong to whoever called it: they outlive this instance, if not its machine.
        """
        return (True, *(self._kv.pop(id, None) for id in ids)) if ids else True

    async def _load(self, handle: WeightsHandle) -> None:
        weights = await self._weights(handle)
        for attempt in range(LOADS):
            try:
                return await self._engine.load(weights)
            except ChecksumError as error:
                if attempt + 1 == LOADS:
                    raise
                log.warning("%s; copying it again", error)
        raise AssertionError("the last try returns or raises")

    async def _swap(self, old: int, handle: WeightsHandle) -> None:
        await self._engine.swap(old, await self._weights(handle))

    async def _weights(self, handle: WeightsHandle) -> Weights:
        return await handle.fetch_soon(self._options.pull_s)

    async def _suspend(self, ids: Sequence[int], kv: bool) -> list[Suspended]:
        """Those that were here; in the place of KV stands its size, until the driver puts a reference there.

        What the engine has not been given yet goes back as it came.
        """
        found = [replace(each, kv=each.kv if kv else None) for each in self._turned_back(ids, SuspendedError)]
        for suspended in await self._engine.suspend(ids, kv=kv):
            if suspended.kv is not None:
                self._kv[suspended.request.id] = flat(suspended.kv)
                suspended = replace(suspended, kv=KvReference(None, suspended.kv.nbytes))  # type: ignore[arg-type]
            found.append(suspended)
        return found

    async def _abort(self, ids: Sequence[int]) -> None:
        self._turned_back(ids, AbortedError)
        await self._engine.abort(ids)

    def _turned_back(self, ids: Sequence[int], error: type[StrettoError]) -> list[Suspended]:
        """Take out what still waits for its KV: calls count in their order, although pulling takes a while."""
        found = [self._arriving.pop(id) for id in ids if id in self._arriving]
        for each in found:
            each.taken_back = error(f"trajectory {each.suspended.request.id} was taken back before its KV arrived")
            each.pull.cancel()
        return [each.suspended for each in found]

    async def _resume(self, suspended: Suspended) -> Completion:
        """Go on with its KV if that can be had, otherwise from its tokens."""
        held: Any = suspended.kv
        if isinstance(held, KvReference):
            suspended = replace(suspended, kv=await self._arrived(suspended, held))
        return await self._engine.resume(suspended)

    async def _arrived(self, suspended: Suspended, held: KvReference) -> torch.Tensor | None:
        """Its KV on this machine, or None where that cannot be had. Raises where it is taken back meanwhile."""
        id = suspended.request.id
        pull = asyncio.ensure_future(pulled(held.ref, self._options.pull_s, f"the KV of trajectory {id}"))
        arrival = self._arriving[id] = _Arrival(suspended, pull)
        try:
            await asyncio.wait({pull})
        finally:
            pull.cancel()
            if arrival.taken_back is None:
                del self._arriving[id]
        if arrival.taken_back is not None:
            raise arrival.taken_back
        try:
            return shaped(pull.result()).clone()
        except LostObjectError as error:
            log.warning("%s; its context is prefilled again", error)
            return None
