"""What the actor of an instance does, in this process: no cluster is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import stretto.cluster.instance_actor as module
from stretto.cluster.instance_actor import InstanceActor, InstanceOptions, TakenOut
from stretto.cluster.weights import RayKVRef
from stretto.engines.fake import FakeSteppedEngine
from stretto.engines.threaded import ThreadedEngine
from stretto.errors import AbortedError, LostObjectError, SuspendedError
from stretto.models.checksums import checksum
from stretto.types import Request, Sampling, Suspended, Weights


def weights() -> Weights:
    tensors = {"a": torch.zeros(4)}
    return Weights(0, "full", tensors, checksum(tensors))


class Pulls:
    """Objects that come when they are told to."""

    def __init__(self) -> None:
        self.come = asyncio.Event()
        self.begun = 0

    async def __call__(self, ref: Any, timeout_s: float, name: str) -> Any:
        self.begun += 1
        await self.come.wait()
        raise LostObjectError(f"{name} is lost")


Story = Callable[[InstanceActor, list[Suspended], Pulls], Awaitable[None]]


def on_an_instance(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `story(instance, moving, pulls)` happen; `moving` are trajectories whose KV lies elsewhere."""

    async def main() -> None:
        pulls = Pulls()
        monkeypatch.setattr(module, "pull", pulls)
        made = InstanceActor(InstanceOptions(FakeSteppedEngine, 1, None, report_s=0.01, idle_s=0.1, pull_s=5.0))
        engine = made._engine = ThreadedEngine(lambda: FakeSteppedEngine(rows=8, median_tokens=400.0, step_s=0.001))
        await engine.load(weights())
        running = [asyncio.create_task(engine.generate(Request(n, 0, (1, 2), n, Sampling(500)))) for n in range(8)]
        while engine.report().running < 8:
            await asyncio.sleep(0.001)
        out = await engine.suspend(range(8), kv=False)
        await asyncio.gather(*running, return_exceptions=True)
        moving = [replace(each, kv=RayKVRef(100, "lies elsewhere")) for each in out]
        try:
            await story(made, moving, pulls)
        finally:
            await engine.close()

    asyncio.run(main())


async def arriving(made: InstanceActor, moving: list[Suspended], pulls: Pulls) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(made._resume(each)) for each in moving]
    while pulls.begun < len(moving):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("late", [True, False], ids=["as it arrives", "before it arrives"])
def test_what_is_called_back_before_its_kv_has_arrived_goes_back_as_it_came(
    kv: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would begin here after the call, and the version could not be unloaded as it was told to be."""

    async def story(made: InstanceActor, moving: list[Suspended], pulls: Pulls) -> None:
        tasks = await arriving(made, moving, pulls)
        if late:  # the object is there, and the trajectory has not heard of it
            pulls.come.set()
            while not all(each.pull.done() for each in made._pulling.values()):
                await asyncio.sleep(0)
        back = await made._suspend(range(8), kv)
        pulls.come.set()
        await asyncio.sleep(0.05)
        await made._engine.unload(0)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, SuspendedError) for each in ended), ended
        assert back == [TakenOut(each if kv else replace(each, kv=None), None) for each in moving]
        assert not made._pulling

    on_an_instance(story, monkeypatch)


def test_what_is_aborted_before_its_kv_has_arrived_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(made: InstanceActor, moving: list[Suspended], pulls: Pulls) -> None:
        tasks = await arriving(made, moving, pulls)
        await made._abort([0, 1])
        again = asyncio.create_task(made._resume(moving[0]))  # the same one comes back before the first has ended
        pulls.come.set()
        ended = await asyncio.gather(*tasks, again, return_exceptions=True)
        assert [isinstance(each, AbortedError) for each in ended] == [True, True, *[False] * 7]
        assert ended[-1].id == 0
        assert not made._pulling

    on_an_instance(story, monkeypatch)
