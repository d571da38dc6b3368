"""The pool of a cluster: who is made, who is not, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray_cases import options_of, small_cluster

import stretto.cluster.pool as module
from stretto.cluster.pool import RayPool
from stretto.cluster.weights import WeightsStore
from stretto.engines.fake import FakeSteppedEngine
from stretto.errors import EngineError, ModelError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


def pool_of(make: Callable[[], Any], cpus: float = 0.25) -> RayPool:
    return RayPool(options_of(make), cpus=cpus, gpus=0.0, store=WeightsStore(), instance_seconds=30.0)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


async def until(condition: Callable[[], bool]) -> bool:
    for _ in range(300):
        if condition():
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.slow
def test_ids_are_never_used_twice_and_room_is_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EXPLAIN_S", 1.0)

    async def main() -> None:
        before = free_cpus()
        pool = pool_of(lambda: FakeSteppedEngine(slots=3))
        (first, engine), (second, _) = await asyncio.gather(pool.add(), pool.add())
        assert sorted(pool.engines) == [first, second] == [0, 1]
        assert "instance 0 has not begun after 1 s: " in caplog.text  # to import torch takes longer than that
        assert engine.capacity.slots == 3
        await pool.remove(0)
        await pool.remove(0)
        with pytest.raises(EngineError, match="instance 0 is closed"):
            await engine.abort([])
        assert (await pool.add())[0] == 2
        await pool.close()
        await pool.close()
        assert not pool.engines
        assert await until(lambda: free_cpus() == before)

    asyncio.run(main())


def test_an_instance_that_cannot_be_made_says_why() -> None:
    def fail() -> Any:
        raise ModelError("`model.path = 'x'` is no model")

    async def main() -> None:
        pool = pool_of(fail)
        with pytest.raises(EngineError, match=r"instance 0 has not loaded its model: `model.path = 'x'` is no model"):
            await pool.add()
        assert not pool.engines
        await pool.close()

    asyncio.run(main())


def test_where_there_is_no_room_it_names_what_to_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PLACE_S", 2.0)
    monkeypatch.setattr(module, "EXPLAIN_S", 0.5)

    async def main() -> None:
        pool = pool_of(FakeSteppedEngine, cpus=1000.0)
        asks = r"it asks for 1000 CPUs \(`runtime.instance_cpus`, `runtime.instance_gpus`\)"
        lacks = f"no machine has taken it yet: {asks}, and free in the cluster are .* of 4 CPUs"
        with pytest.raises(EngineError, match=f"instance 0 has not begun after 2 s: {lacks}"):
            await pool.add()
        assert re.search(f"instance 0 has not begun after 0.5 s: {lacks}", caplog.text)
        await pool.close()

    asyncio.run(main())


def test_a_pool_that_is_closed_ends_what_it_is_making() -> None:
    async def main() -> None:
        before = free_cpus()
        pool = pool_of(FakeSteppedEngine)
        making = asyncio.ensure_future(pool.add())
        await asyncio.sleep(0.5)
        await pool.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(making, 30.0)
        assert not pool.engines
        assert await until(lambda: free_cpus() == before)

    asyncio.run(main())
