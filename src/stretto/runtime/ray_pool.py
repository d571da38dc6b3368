"""Rollout instances as actors of a Ray cluster, placed by what they ask for (`runtime.instance_cpus`, `instance_gpus`).

Machines may come and go while a run is on them. What was on one that is gone is lost and replaced wherever there is
room; where there is none, a new instance waits for a machine with room for as long as `PLACE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray.exceptions import RayError, RayTaskError

from stretto.engines.protocol import Engine
from stretto.errors import EngineError, StrettoError
from stretto.runtime.ray_engine import RayEngine, place
from stretto.runtime.ray_instance import InstanceOptions, Started
from stretto.runtime.ray_mail import end
from stretto.runtime.ray_placement import why_not_begun
from stretto.runtime.ray_weights import WeightsStore

log = logging.getLogger(__name__)

PLACE_S = 300.0  # for a machine with room, and for the process to import what it needs
STARTS = 3  # tries of one instance, where it dies before it has started
START_S = 1_800.0  # for a model to be loaded
WAITS_S = 60.0  # after so long it is said what it may be waiting for


class _GoneError(EngineError):
    """An instance that was being made died on the way."""


class RayPool:
    """The `Pool` of a cluster. Ids are never used twice; `first` is the smallest."""

    def __init__(
        self,
        options: InstanceOptions,
        *,
        cpus: float,
        gpus: float,
        store: WeightsStore,
        instance_seconds: float,
        first: int = 0,
    ) -> None:
        self._options = options
        self._cpus, self._gpus = cpus, gpus
        self._store = store
        self._seconds = instance_seconds
        self._next = first
        self._engines: dict[int, RayEngine] = {}
        self._closed = False
        self._starting: set[Any] = set()  # actors that nobody else knows of yet

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The instances by their ids; a live view."""
        return MappingProxyType(self._engines)

    async def add(self) -> tuple[int, Engine]:
        """Make an instance, wherever there is room. Raises `EngineError` where there is none, or it cannot start."""
        instance, self._next = self._next, self._next + 1
        name = f"instance {instance}"
        for attempt in range(STARTS):
            try:
                actor, started = await self._start(name)
                break
            except _GoneError as error:  # with its machine, maybe: there are others
                if attempt + 1 == STARTS or self._closed:
                    raise EngineError(str(error)) from error
                log.warning("%s; it is placed again", error)
        engine = RayEngine(actor, started, name=name, store=self._store, instance_seconds=self._seconds)
        self._engines[instance] = engine
        log.info("%s runs on machine %s, process %d", name, started.node[:8], started.process)
        return instance, engine

    async def _start(self, name: str) -> tuple[Any, Started]:
        actor = place(self._options, cpus=self._cpus, gpus=self._gpus)
        self._starting.add(actor)
        try:
            await self._placed(actor, name)
            return actor, await self._answer(actor.start.remote(), START_S, f"{name} has not loaded its model")
        except BaseException:
            end(actor)
            raise
        finally:
            self._starting.discard(actor)

    async def remove(self, instance: int) -> None:
        """End an instance, whatever state it is in."""
        engine = self._engines.pop(instance, None)
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        """End all of them, and those that are being made."""
        self._closed = True
        for actor in list(self._starting):
            end(actor)
        await asyncio.gather(*(self.remove(instance) for instance in list(self._engines)))

    async def _placed(self, actor: Any, name: str) -> None:
        """Wait until an actor has a process somewhere."""
        gpus = f" and {self._gpus:g} GPUs" if self._gpus else ""
        asks = f"it asks for {self._cpus:g} CPUs{gpus} (`runtime.instance_cpus`, `runtime.instance_gpus`)"
        ready = asyncio.ensure_future(self._answer(actor.ready.remote(), PLACE_S, f"{name} has not begun"))
        try:
            done, _ = await asyncio.wait({ready}, timeout=WAITS_S)
            if not done:
                why = await asyncio.to_thread(why_not_begun, [actor], asks)
                log.warning("%s has not begun after %g s: %s", name, WAITS_S, why)
            await ready
        except _GoneError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}: {await asyncio.to_thread(why_not_begun, [actor], asks)}") from error
        finally:
            ready.cancel()

    async def _answer(self, reference: Any, seconds: float, late: str) -> Any:
        async def get() -> Any:
            return await reference

        try:
            return await asyncio.wait_for(get(), seconds)
        except TimeoutError:
            raise EngineError(f"{late} after {seconds:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            said = str(cause) if isinstance(cause, StrettoError) else f"{type(cause).__name__}: {cause}"
            raise EngineError(f"{late}: {said}") from error
        except RayError as error:
            raise _GoneError(f"{late}: {str(error).strip().partition(chr(10))[0]}") from error
