"""Rollout instances as actors of a Ray cluster, placed by what they ask for (`runtime.instance_cpus`, `instance_gpus`).

Machines may come and go during a run. Instances on a machine that is gone are lost, and replaced on any machine with
room. If no machine has room, a new instance waits for one for at most `PLACE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError

from stretto.cluster.actor_calls import kill
from stretto.cluster.actor_placement import why_not_started
from stretto.cluster.engine import RayEngine, place
from stretto.cluster.instance_actor import InstanceOptions, Started
from stretto.cluster.weights import WeightsStore
from stretto.engines.protocol import Engine
from stretto.errors import EngineError, describe, first_line
from stretto.run.pool_base import InstancePool

log = logging.getLogger(__name__)

PLACE_S = 300.0  # for a machine with room, and for the process to import what it needs
STARTS = 3  # attempts to start one instance, if it dies while it starts
START_S = 1_800.0  # for the model to be loaded
EXPLAIN_S = 60.0  # after so long the log says what an instance waits for


class _DiedError(EngineError):
    """An instance died while it started."""


class RayPool(InstancePool):
    """The `Pool` of a cluster."""

    def __init__(
        self, options: InstanceOptions, *, cpus: float, gpus: float, store: WeightsStore, instance_seconds: float
    ) -> None:
        super().__init__()
        self._options = options
        self._cpus, self._gpus = cpus, gpus
        self._store = store
        self._seconds = instance_seconds
        self._closed = False
        self._starting: set[Any] = set()  # actors that have no engine yet

    async def add(self) -> tuple[int, Engine]:
        """Starts an instance on a machine with room. Raises `EngineError` if there is none, or it cannot start."""
        instance = self._new_id()
        name = f"instance {instance}"
        for attempt in range(STARTS):
            try:
                actor, started = await self._start(name)
                break
            except _DiedError as error:  # perhaps with its machine: there are others
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
            await self._wait_until_placed(actor, name)
            return actor, await _answer(actor.start.remote(), START_S, f"{name} has not loaded its model")
        except BaseException:
            kill(actor)
            raise
        finally:
            self._starting.discard(actor)

    async def close(self) -> None:
        """Ends all instances, and those that are starting."""
        self._closed = True
        for actor in list(self._starting):
            kill(actor)
        await super().close()

    async def _wait_until_placed(self, actor: Any, name: str) -> None:
        """Returns once the actor has a process. Raises `EngineError` with the reason if it has none after `PLACE_S`."""
        gpus = f" and {self._gpus:g} GPUs" if self._gpus else ""
        asks = f"it asks for {self._cpus:g} CPUs{gpus} (`runtime.instance_cpus`, `runtime.instance_gpus`)"
        ready = asyncio.ensure_future(_answer(actor.ready.remote(), PLACE_S, f"{name} has not begun"))
        try:
            done, _ = await asyncio.wait({ready}, timeout=EXPLAIN_S)
            if not done:
                why = await asyncio.to_thread(why_not_started, [actor], asks)
                log.warning("%s has not begun after %g s: %s", name, EXPLAIN_S, why)
            await ready
        except _DiedError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}: {await asyncio.to_thread(why_not_started, [actor], asks)}") from error
        finally:
            ready.cancel()


async def _answer(reference: Any, seconds: float, late: str) -> Any:
    """Returns the result of a Ray call. Raises `EngineError` that begins with `late` if it fails or is not in time."""
    try:
        return await asyncio.wait_for(reference, seconds)
    except TimeoutError:
        raise EngineError(f"{late} after {seconds:g} s") from None
    except RayTaskError as error:
        raise EngineError(f"{late}: {describe(error.cause)}") from error
    except RayError as error:
        raise _DiedError(f"{late}: {first_line(error)}") from error
