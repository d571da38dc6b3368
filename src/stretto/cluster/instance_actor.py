"""The actor of a rollout instance: an engine in a thread, called through `actor_calls.py`.

This module is imported on the machine of the instance. The instance loads the model itself. Versions come from Ray's
object store, and the KV of suspended trajectories goes there: from one instance to the next, past the driver.
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

from stretto.cluster.actor_calls import CallServer, ServingActor
from stretto.cluster.weights import FlatTensor, RayKVRef, RayWeightsRef, flatten, pull, unflatten
from stretto.engines.protocol import Capabilities
from stretto.engines.threaded import SteppedEngine, ThreadedEngine
from stretto.errors import AbortedError, LostObjectError, StrettoError, SuspendedError
from stretto.types import Capacity, Completion, EngineStats, Receipt, Suspended

log = logging.getLogger(__name__)

SWITCH_S = 1e-4  # the engine's thread and the actor's share one interpreter lock; see `assembly/train.py`


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """The options of an instance, wherever it is placed."""

    make: Callable[[], SteppedEngine]  # called in the engine's thread
    threads: int  # of torch
    longest: int | None  # tokens of the longest trajectory that is expected
    report_s: float  # between two reports while the instance is busy
    idle_s: float  # between two reports otherwise
    pull_s: float  # for an object to arrive


@dataclass(frozen=True, slots=True)
class Started:
    """The answer of an instance that is ready to use."""

    capacity: Capacity
    capabilities: Capabilities
    load: EngineStats
    node: str
    process: int


@dataclass(frozen=True, slots=True)
class TakenOut:
    """A trajectory that was suspended, without the KV that the instance keeps for `take_kv`."""

    suspended: Suspended
    kv_bytes: int | None  # of that KV; None if the instance keeps none


@dataclass(slots=True, eq=False)
class _PendingResume:
    """A trajectory that resumes here once its KV has been pulled."""

    suspended: Suspended
    pull: asyncio.Future[FlatTensor]
    cancelled_by: StrettoError | None = None  # a `suspend` or an `abort` that came before the KV


class InstanceActor(ServingActor):
    """The actor. The driver calls `ready` and `start` once each, then `deliver`, `collect` and `take_kv`, and `end`."""

    def __init__(self, options: InstanceOptions) -> None:
        self._options = options
        self._engine: ThreadedEngine
        self._kv: dict[int, FlatTensor] = {}  # trajectory -> KV that it was suspended with, until `take_kv`
        self._pulling: dict[int, _PendingResume] = {}  # trajectories that the engine does not have yet

    async def ready(self) -> None:
        """Returns once the actor has a process."""

    async def start(self) -> Started:
        """Makes the engine, and raises whatever that raises."""
        sys.setswitchinterval(SWITCH_S)
        options = self._options
        self._engine = await asyncio.to_thread(
            ThreadedEngine, options.make, threads=options.threads, name="engine", longest=options.longest
        )
        engine = self._engine
        self._server = CallServer(
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
            report_s=options.report_s,
            idle_s=options.idle_s,
        )
        node = ray.get_runtime_context().get_node_id()
        return Started(engine.capacity, engine.capabilities, engine.report(), node, os.getpid())

    async def end(self) -> None:
        """Ends the engine, with the processes that it has started."""
        await self._engine.close()

    async def take_kv(self, ids: Sequence[int]) -> Any:
        """Returns True and the KV of suspended trajectories, an object each.

        The caller owns the results of a Ray call, so they outlive this instance, but not its machine.
        """
        return (True, *(self._kv.pop(id, None) for id in ids)) if ids else True

    async def _load(self, weights: RayWeightsRef) -> Receipt | None:
        return await self._engine.load(await weights.fetch_async(self._options.pull_s))

    async def _swap(self, old: int, weights: RayWeightsRef) -> None:
        await self._engine.swap(old, await weights.fetch_async(self._options.pull_s))

    async def _suspend(self, ids: Sequence[int], kv: bool) -> list[TakenOut]:
        """Suspends those of the trajectories that are here. One that still waits for its KV goes back as it came."""
        waiting = self._cancel_pulls(ids, SuspendedError)
        found = [TakenOut(each if kv else replace(each, kv=None), None) for each in waiting]
        for suspended in await self._engine.suspend(ids, kv=kv):
            held = suspended.kv
            if held is None:
                found.append(TakenOut(suspended, None))
                continue
            assert isinstance(held, torch.Tensor), "an engine in this process hands over the KV itself"
            self._kv[suspended.request.id] = flatten(held)
            found.append(TakenOut(replace(suspended, kv=None), held.nbytes))
        return found

    async def _abort(self, ids: Sequence[int]) -> None:
        self._cancel_pulls(ids, AbortedError)
        await self._engine.abort(ids)

    def _cancel_pulls(self, ids: Sequence[int], error: type[StrettoError]) -> list[Suspended]:
        """Takes out the trajectories that still wait for their KV: calls count in their order, although a pull takes
        a while."""
        found = [self._pulling.pop(id) for id in ids if id in self._pulling]
        for each in found:
            each.cancelled_by = error(f"trajectory {each.suspended.request.id} was taken back before its KV arrived")
            each.pull.cancel()
        return [each.suspended for each in found]

    async def _resume(self, suspended: Suspended) -> Completion:
        """Resumes a trajectory with its KV, or by prefilling again if its KV is lost."""
        if isinstance(suspended.kv, RayKVRef):
            suspended = replace(suspended, kv=await self._pull_kv(suspended, suspended.kv))
        return await self._engine.resume(suspended)

    async def _pull_kv(self, suspended: Suspended, held: RayKVRef) -> torch.Tensor | None:
        """Returns the KV of a trajectory, or None if it is lost. Raises if the trajectory is taken back meanwhile."""
        id = suspended.request.id
        pulling = asyncio.ensure_future(pull(held.ref, self._options.pull_s, f"the KV of trajectory {id}"))
        pending = self._pulling[id] = _PendingResume(suspended, pulling)
        try:
            await asyncio.wait({pulling})
        finally:
            pulling.cancel()
            if pending.cancelled_by is None:
                del self._pulling[id]
        if pending.cancelled_by is not None:
            raise pending.cancelled_by
        try:
            return unflatten(pulling.result()).clone()
        except LostObjectError as error:
            log.warning("%s; its context is prefilled again", error)
            return None
