"""One rollout instance on a cluster, as the loop sees it: the `Engine` protocol over an actor.

`report` is what the actor said last; nothing in here blocks. An instance is lost, and every call raises `EngineError`,
when its process or its machine dies, and when it does not answer for `runtime.instance_seconds`. That it answers and
makes no token, whoever gave it the work finds by its reports (`instances.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from stretto.errors import ChecksumError, EngineError, LostObjectError
from stretto.runtime.ray_instance import Instance, InstanceOptions, Started
from stretto.runtime.ray_mail import Remote
from stretto.runtime.ray_weights import KvReference, WeightsStore
from stretto.types import Capacity, Completion, Load, Request, Suspended, Weights

TRANSFERS = 3  # of one version to one instance, where what arrives is damaged or lost


def place(options: InstanceOptions, *, cpus: float, gpus: float, spread: bool = True) -> Any:
    """Ask for an actor with these resources. Returns at once; where there is no room for it, it waits for some."""
    return (
        ray.remote(Instance)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,  # an instance that died is replaced by another, which knows that it holds nothing
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
        self._name = name
        self._store = store
        self._followed: set[int] = set()  # trajectories that somebody waits for
        self._remote = Remote(actor, name, deadline_s=instance_seconds, told=self._told)

    @property
    def capacity(self) -> Capacity:
        """What it can hold."""
        return self._capacity

    def report(self) -> Load:
        """What it said last of what it is doing."""
        return self._load

    async def load(self, weights: Weights) -> None:
        await self._transfer("load", (), weights)

    async def swap(self, old: int, weights: Weights) -> None:
        await self._transfer("swap", (old,), weights)

    async def unload(self, version: int) -> None:
        await self._remote.call("unload", version)

    async def generate(self, request: Request) -> Completion:
        return await self._follow("generate", request, request.id)

    async def resume(self, suspended: Suspended) -> Completion:
        return await self._follow("resume", suspended, suspended.request.id)

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        found: list[Suspended] = await self._remote.call("suspend", list(ids), kv)
        held = [suspended.request.id for suspended in found if _to_be_taken(suspended)]
        if not held:
            return found
        there, *refs = self._remote.actor.take_kv.options(num_returns=len(held) + 1).remote(held)
        references = dict(zip(held, refs, strict=True))
        await self._remote.arrived(there, "the KV of what was suspended")
        return [_with_reference(suspended, references.get(suspended.request.id)) for suspended in found]

    async def abort(self, ids: Sequence[int]) -> None:
        await self._remote.call("abort", list(ids))

    async def shrink(self, share: float) -> int:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"`share = {share}` of the KV cache to keep must be above 0 and at most 1")
        kept: int = await self._remote.call("shrink", share)
        return kept

    async def close(self) -> None:
        await self._remote.close()

    async def _transfer(self, how: str, before: tuple[Any, ...], weights: Any) -> None:
        """Have the instance pull a version. What is damaged or lost on the way is put into the store again.

        Raises `LostObjectError` where nobody has the version any more: then no other instance could get it either.
        """
        handle = await self._store.handle(weights)
        for attempt in range(TRANSFERS):
            ref = handle.ref
            try:
                await self._remote.call(how, *before, handle)
                return
            except (ChecksumError, LostObjectError) as error:
                if attempt + 1 < TRANSFERS:
                    await self._store.renew(handle, ref, error)
                elif isinstance(error, ChecksumError):
                    raise
                else:  # there is a whole copy, and it does not come here
                    self._remote.lose(f"cannot get version {handle.version}: {error}")
                    raise EngineError(f"{self._name} cannot get version {handle.version}: {error}") from error

    async def _follow(self, how: str, work: Request | Suspended, trajectory: int) -> Completion:
        own = trajectory not in self._followed  # else it will be refused, and the trajectory is somebody else's
        self._followed.add(trajectory)
        try:
            result: Completion = await self._remote.call(how, work, bounded=False)
        except asyncio.CancelledError:
            if own and self._remote.failure is None:
                self._remote.forget(self._remote.begin("abort", [trajectory]))  # an orphan would hold a row to its end
            raise
        finally:
            if own:
                self._followed.discard(trajectory)
        return result

    def _told(self, status: tuple[Load, Capacity]) -> None:
        self._load, self._capacity = status


def _to_be_taken(suspended: Suspended) -> bool:
    """Whether its KV is at the instance, which has said only how large it is."""
    held: Any = suspended.kv
    return held is not None and held.ref is None


def _with_reference(suspended: Suspended, ref: Any) -> Suspended:
    """The trajectory with where its KV is in the place of how large it is."""
    held: Any = suspended.kv
    return suspended if ref is None else replace(suspended, kv=KvReference(ref, held.nbytes))  # type: ignore[arg-type]
