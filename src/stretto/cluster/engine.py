"""One rollout instance on a cluster: the `Engine` protocol over an actor.

Nothing in here blocks. `report` returns the last status of the actor. An instance is lost, and every call raises
`EngineError`, when its process or its machine dies, and when it does not answer for `runtime.instance_seconds`. An
instance that answers but makes no tokens is found by its reports (`run/instance_membership.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from stretto.cluster.actor_calls import ActorCalls
from stretto.cluster.instance_actor import InstanceActor, InstanceOptions, Started, TakenOut
from stretto.cluster.weights import RayKVRef, WeightsStore
from stretto.errors import ChecksumError, LostObjectError
from stretto.types import Capacity, Completion, EngineStats, Receipt, Request, Suspended, Weights, WeightsRef

END_S = 10.0  # for an engine to end its own processes


def place(options: InstanceOptions, *, cpus: float, gpus: float, spread: bool = True) -> Any:
    """Asks for an actor with these resources and returns it at once. It waits for a machine with room."""
    return (
        ray.remote(InstanceActor)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,  # an instance that died is replaced by another one, which holds no version
            max_task_retries=0,
            scheduling_strategy="SPREAD" if spread else "DEFAULT",
        )
        .remote(options)
    )


class RayEngine:
    """The `Engine` protocol over an instance that has started."""

    def __init__(
        self, actor: Any, started: Started, *, name: str, store: WeightsStore, instance_seconds: float
    ) -> None:
        self.node, self.process = started.node, started.process
        self._capacity, self._load = started.capacity, started.load
        self.capabilities = started.capabilities
        self._store = store
        self._awaited: set[int] = set()  # trajectories that a call waits for
        self._remote = ActorCalls(actor, name, deadline_s=instance_seconds, on_status=self._on_status)

    @property
    def capacity(self) -> Capacity:
        """The capacity in the last report of the instance."""
        return self._capacity

    def report(self) -> EngineStats:
        """Returns the last report of the instance."""
        return self._load

    async def load(self, weights: Weights | WeightsRef) -> Receipt | None:
        return await self._transfer("load", (), weights)

    async def swap(self, old: int, weights: Weights | WeightsRef) -> None:
        await self._transfer("swap", (old,), weights)

    async def unload(self, version: int) -> None:
        await self._remote.call("unload", version)

    async def generate(self, request: Request) -> Completion:
        return await self._follow("generate", request, request.id)

    async def resume(self, suspended: Suspended) -> Completion:
        return await self._follow("resume", suspended, suspended.request.id)

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        found: list[TakenOut] = await self._remote.call("suspend", list(ids), kv)
        held = [each.suspended.request.id for each in found if each.kv_bytes is not None]
        if not held:
            return [each.suspended for each in found]
        there, *refs = self._remote.actor.take_kv.options(num_returns=len(held) + 1).remote(held)
        references = dict(zip(held, refs, strict=True))
        await self._remote.await_result(there, "the KV of suspended trajectories")
        return [
            each.suspended
            if each.kv_bytes is None
            else replace(each.suspended, kv=RayKVRef(each.kv_bytes, references[each.suspended.request.id]))
            for each in found
        ]

    async def abort(self, ids: Sequence[int]) -> None:
        await self._remote.call("abort", list(ids))

    async def shrink(self, share: float) -> int:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"`share = {share}` of the KV cache to keep must be above 0 and at most 1")
        kept: int = await self._remote.call("shrink", share)
        return kept

    async def close(self) -> None:
        if self._remote.failure is None and self.capabilities.confirms == "receipt":
            # It runs in a process of its own. Ray would kill that one with the actor, and neither those that it has
            # started nor its files.
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._remote.actor.end.remote(), END_S)
        await self._remote.close()

    async def _transfer(self, how: str, before: tuple[Any, ...], weights: Weights | WeightsRef) -> Receipt | None:
        """Has the instance pull a version, once: `run/version_loader.py` is what sends a version again.

        Raises `ChecksumError` or `LostObjectError`; `weights.recreate` then replaces the copy that was sent.
        """
        reference = await self._store.reference(weights)
        ref = reference.ref
        try:
            receipt: Receipt | None = await self._remote.call(how, *before, reference)
        except (ChecksumError, LostObjectError):
            reference.failed_ref = ref
            raise
        return receipt

    async def _follow(self, how: str, work: Request | Suspended, trajectory: int) -> Completion:
        own = trajectory not in self._awaited  # else the engine refuses it, and the first call continues
        self._awaited.add(trajectory)
        try:
            result: Completion = await self._remote.call(how, work, bounded=False)
        except asyncio.CancelledError:
            if own and self._remote.failure is None:
                self._remote.ignore(self._remote.begin("abort", [trajectory]))  # an orphan would hold a row to its end
            raise
        finally:
            if own:
                self._awaited.discard(trajectory)
        return result

    def _on_status(self, status: tuple[EngineStats, Capacity]) -> None:
        self._load, self._capacity = status
