"""One small cluster for all tests of a session that need one, and instances on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

import stretto.cluster.actor_calls as actor_calls
from stretto.cluster.engine import RayEngine, place
from stretto.cluster.instance_actor import InstanceActor, InstanceOptions, Started
from stretto.cluster.weights import WeightsStore

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not look for modules among the tests
QUIET = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}


@contextmanager
def small_cluster(cpus: int = 4) -> Iterator[None]:
    """A cluster of this process's own. It takes seconds to start, so it stays for whoever comes next."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=cpus, object_store_memory=256 << 20, **QUIET)
    yield


def options_of(make: Callable[[], Any], *, seconds: float = 60.0, report_s: float = 0.002) -> InstanceOptions:
    return InstanceOptions(make, threads=1, longest=None, report_s=report_s, idle_s=min(5.0, seconds / 3), pull_s=20.0)


def instance(make: Callable[[], Any], *, seconds: float = 60.0, report_s: float = 0.002) -> RayEngine:
    """An instance that has started, on a quarter of a processor."""
    actor = place(options_of(make, seconds=seconds, report_s=report_s), cpus=0.25, gpus=0.0)
    return started(actor, seconds)


def started(actor: Any, seconds: float, *arguments: Any) -> RayEngine:
    result = ray.get(actor.start.remote(*arguments), timeout=240)
    return RayEngine(actor, result, name="instance 0", store=WeightsStore(), instance_seconds=seconds)


@ray.remote(num_cpus=0)
class _Owner:
    def put(self, value: Any) -> list[Any]:
        return [ray.put(value)]


def lost_reference() -> Any:
    """A reference to nothing."""
    owner = _Owner.remote()
    (ref,) = ray.get(owner.put.remote(np.zeros(1 << 20)), timeout=60)
    ray.kill(owner)
    while ray.wait([owner.put.remote(0)], timeout=0.1)[0] == []:
        time.sleep(0.1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the object outlives its owner by a moment
        try:
            ray.get(ref, timeout=5)
        except RayError:
            return ref
        time.sleep(0.1)
    raise AssertionError("the object has outlived its owner by a minute")


class _Again(InstanceActor):
    """An instance whose process is used for one engine after another: it is what takes long to start."""

    def __init__(self) -> None:
        super().__init__(options_of(lambda: None))

    async def start(self, options: InstanceOptions | None = None) -> Started:
        if hasattr(self, "_engine"):
            await self._engine.close()
        assert options is not None
        self._options = options
        return await super().start()


class Processes:
    """Engines for the contract, each in an actor that had another before."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def engine(self, make: Callable[[], Any]) -> RayEngine:
        actor = self._free.pop() if self._free else ray.remote(_Again).options(num_cpus=0.25).remote()
        return started(actor, 60.0, options_of(make))

    @contextmanager
    def spared(self) -> Iterator[Processes]:
        """What ends an actor only sets it free."""
        ended, actor_calls.kill = actor_calls.kill, self._free.append
        try:
            yield self
        finally:
            actor_calls.kill = ended

    def close(self) -> None:
        for actor in self._free:
            ray.kill(actor)
