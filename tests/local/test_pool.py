"""Instances that one process makes and ends while a run goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from stretto.engines import threaded
from stretto.engines.fake import FakeSteppedEngine
from stretto.errors import EngineError
from stretto.local import pool as pool_module
from stretto.local.pool import LocalPool
from stretto.run.protocols import FixedPool, Pool
from stretto.types import Request, Sampling, Weights

WEIGHTS = Weights(0, "full", {}, "sum")


def request(id: int) -> Request:
    return Request(id, 0, (1, 2, 3), seed=id, sampling=Sampling(8))


def threads(within_s: float = 0.0) -> set[str]:
    """Of instances, once those that are ending have had their time."""
    until = time.monotonic() + within_s
    while (left := _threads()) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "instance " in thread.name}


def test_instances_are_made_and_ended_and_no_id_comes_twice() -> None:
    async def story() -> None:
        pool: Pool = LocalPool(FakeSteppedEngine)
        (first, engine), (second, _) = [await pool.add() for _ in range(2)]
        assert (first, second) == (0, 1)
        await engine.load(WEIGHTS)
        assert len((await engine.generate(request(4))).tokens)
        await pool.remove(first)
        await pool.remove(first)
        assert list(pool.engines) == [1]
        assert (await pool.add())[0] == 2
        # The thread that made one may have a moment to live.
        assert {name for name in threads() if not name.startswith("start of")} == {"instance 1", "instance 2"}
        await pool.close()
        await pool.close()
        assert not pool.engines

    asyncio.run(story())
    assert not threads(5.0)


def test_one_that_cannot_be_made_is_an_error_that_names_it_and_the_next_has_another_id() -> None:
    makes: Iterator[BaseException | FakeSteppedEngine] = iter([MemoryError("none left"), FakeSteppedEngine()])

    def make() -> FakeSteppedEngine:
        made = next(makes)
        if isinstance(made, BaseException):
            raise made
        return made

    async def story() -> None:
        pool = LocalPool(make)
        with pytest.raises(EngineError, match="instance 0 cannot be made: MemoryError: none left"):
            await pool.add()
        assert not pool.engines
        assert (await pool.add())[0] == 1
        await pool.close()

    asyncio.run(story())


def test_one_that_is_being_made_when_nobody_waits_any_more_is_ended_too() -> None:
    def make() -> FakeSteppedEngine:
        time.sleep(0.1)
        return FakeSteppedEngine()

    async def story() -> None:
        pool = LocalPool(make)
        adding = asyncio.create_task(pool.add())
        await asyncio.sleep(0.02)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        await pool.close()
        assert not pool.engines

    asyncio.run(story())
    assert not threads(5.0)


def test_one_that_takes_too_long_to_be_made_is_an_error_and_holds_up_neither_the_next_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "START_S", 0.1)
    monkeypatch.setattr(pool_module, "CLOSE_S", 0.1)
    go_on = threading.Event()
    makes = iter([True, False])

    def make() -> FakeSteppedEngine:
        if next(makes):
            go_on.wait()
            raise MemoryError("too late anyway")
        return FakeSteppedEngine()

    async def story() -> None:
        pool = LocalPool(make)
        with pytest.raises(EngineError, match=r"instance 0 has not started after 0\.1 s"):
            await pool.add()
        assert (await pool.add())[0] == 1
        await asyncio.wait_for(pool.close(), 2.0)

    try:
        asyncio.run(story())
    finally:
        go_on.set()
    assert not threads(5.0), "one that is made after all is ended"


def test_a_thread_that_hangs_does_not_hang_who_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Hangs(FakeSteppedEngine):
        def load(self, weights: Weights) -> None:
            go_on.wait()

    async def story() -> None:
        pool = LocalPool(Hangs)
        instance, engine = await pool.add()
        loading = asyncio.create_task(engine.load(WEIGHTS))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(threaded, "CLOSE_S", 0.1)
        await asyncio.wait_for(pool.remove(instance), 2.0)
        loading.cancel()

    try:
        asyncio.run(story())
    finally:
        go_on.set()
    assert not threads(5.0)


def test_a_fixed_pool_has_what_it_was_given_and_nothing_else() -> None:
    async def story() -> None:
        local = LocalPool(FakeSteppedEngine)
        pool: Pool = FixedPool({7: (await local.add())[1]})
        assert list(pool.engines) == [7]
        with pytest.raises(EngineError, match="no other instance"):
            await pool.add()
        await pool.remove(7)
        await pool.close()
        await local.close()

    asyncio.run(story())
    assert not threads(5.0)
