"""Instances that die or hang, and weights and KV that are lost or damaged on their way. On a real cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray_cases import instance, lost_reference, small_cluster

from stretto.cluster.weights import PackedWeights, RayKVRef, RayWeightsRef, WeightsStore
from stretto.engines.fake import FakeSteppedEngine
from stretto.engines.native.engine import NativeEngine
from stretto.errors import ChecksumError, EngineError, LostObjectError
from stretto.models.checksums import checksum
from stretto.models.loading import load_model
from stretto.run.version_loader import TRANSFERS, send
from stretto.types import Request, Sampling, Weights


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


def fake(step_s: float = 0.001) -> Any:
    return lambda: FakeSteppedEngine(
        slots=2, rows=8, kv_tokens=4096, max_context=2048, median_tokens=400.0, step_s=step_s
    )


def weights(version: int = 0, value: float = 1.0) -> Weights:
    tensors = {"a": torch.full((256, 4), value), "b": torch.arange(8, dtype=torch.bfloat16)}
    return Weights(version, "full", tensors, checksum(tensors))


def request_of(number: int, tokens: int = 1000) -> Request:
    return Request(number, 0, (1, 2, 3), number, Sampling(tokens))


def is_alive(process: int) -> bool:
    """Whether a process runs. One that has ended and was not yet waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_soon(process: int, seconds: float = 20.0) -> bool:
    late = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < late:
        time.sleep(0.05)
    return not is_alive(process)


def test_weights_come_out_of_the_object_store_as_they_went_in() -> None:
    sent = weights(3)
    version = RayWeightsRef.put(sent)
    assert (version.version, version.kind, version.checksum, version.scale) == (3, "full", sent.checksum, 1.0)
    found = version.fetch()
    assert found.tensors.keys() == sent.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in sent.tensors.items())
    assert checksum(found.tensors) == sent.checksum


def test_an_instance_whose_process_is_killed_says_so_to_everybody() -> None:
    async def main() -> None:
        engine = instance(fake(), seconds=30.0)
        await engine.load(weights())
        running = [asyncio.ensure_future(engine.generate(request_of(n))) for n in range(3)]
        while not engine.report().running:
            await asyncio.sleep(0.01)
        os.kill(engine.process, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 25.0)
        assert all(isinstance(each, EngineError) for each in ended), ended
        with pytest.raises(EngineError, match="instance 0 has died"):
            await engine.load(weights(1))
        assert engine.report().running
        await engine.close()

    asyncio.run(main())


@pytest.mark.slow
def test_an_instance_that_hangs_is_lost_within_its_deadline_and_its_process_is_ended() -> None:
    async def main() -> None:
        engine = instance(fake(), seconds=3.0)
        await engine.load(weights())
        running = asyncio.ensure_future(engine.generate(request_of(0)))
        while not engine.report().running:
            await asyncio.sleep(0.01)
        os.kill(engine.process, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"not answered for 3 s \(`runtime.instance_seconds`\)"):
            await asyncio.wait_for(running, 20.0)
        assert time.monotonic() - began < 8.0
        await engine.close()
        assert await asyncio.to_thread(ends_soon, engine.process)

    asyncio.run(main())


def test_damaged_and_lost_weights_are_put_into_the_store_again(lost: Any) -> None:
    async def main() -> None:
        engine, notes = instance(fake()), list[str]()

        async def load(version: RayWeightsRef) -> None:
            await send(version, lambda: engine.load(version), lambda kind, text: notes.append(kind))

        store = WeightsStore(read_file=lambda version: replace(weights(), version=version.version))
        damaged = store.put(weights())
        damaged.ref = ray.put(PackedWeights.pack(replace(weights(value=2.0), checksum=damaged.checksum)))
        await load(damaged)
        assert store.renewed == 1
        assert (await engine.generate(request_of(0, 5))).checksum == damaged.checksum
        gone = store.own(RayWeightsRef(1, "full", weights().checksum, 1.0, lost))
        await load(gone)
        assert store.renewed == 2
        assert sorted(engine.report().versions) == [0, 1]
        assert notes == ["damaged transfer", "lost transfer"]
        await engine.unload(1)

        bare = WeightsStore()  # which has no files to read a version from
        gone = bare.own(RayWeightsRef(1, "full", weights().checksum, 1.0, lost))
        with pytest.raises(LostObjectError, match=r"version 1 is lost .*`--resume`"):
            await load(gone)
        await engine.load(replace(weights(), version=3))  # the instance is not at fault
        await engine.close()

    asyncio.run(main())


def test_a_version_that_always_arrives_damaged_is_sent_so_often_and_no_more() -> None:
    class Damages(FakeSteppedEngine):
        loads = 0

        def load(self, weights: Weights) -> None:
            self.loads += 1
            raise ChecksumError(f"other bits at load {self.loads}")

    async def main() -> None:
        engine = instance(lambda: Damages())
        version = WeightsStore().put(weights())
        with pytest.raises(EngineError, match=f"other bits at load {TRANSFERS}, {TRANSFERS} times"):
            await send(version, lambda: engine.load(version), lambda kind, text: None)
        await engine.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def lost() -> Any:
    return lost_reference()


def native(path: Path) -> Any:
    def make() -> NativeEngine:
        model = load_model(str(path), torch.float32, torch.device("cpu"))
        return NativeEngine(model, kind="full", slots=1, rows=4, kv_tokens=1024, max_context=512)

    return make


@pytest.mark.slow
def test_kv_outlives_the_instance_that_it_comes_from_and_may_be_lost_after_that(model: Path, lost: Any) -> None:
    base = load_model(str(model), torch.float32, torch.device("cpu"))
    tensors = {name: parameter.detach() for name, parameter in base.named_parameters()}
    version = Weights(0, "full", tensors, checksum(tensors))

    async def main() -> None:
        first, second = instance(native(model)), instance(native(model))
        for engine in (first, second):
            await engine.load(version)
        wanted = await second.generate(request_of(0, 200))
        running = asyncio.ensure_future(first.generate(request_of(0, 200)))
        while first.report().longest.get(0, 0) < 5:
            await asyncio.sleep(0.001)
        (out,) = await first.suspend([0], kv=True)
        await asyncio.gather(running, return_exceptions=True)
        held = out.kv
        assert isinstance(held, RayKVRef)
        assert held.nbytes > 0
        await first.close()
        assert await asyncio.to_thread(ends_soon, first.process)
        before = second.report().prefilled
        done = await second.resume(out)
        assert np.array_equal(done.tokens, wanted.tokens)
        assert second.report().prefilled == before
        again = await second.resume(replace(out, kv=RayKVRef(held.nbytes, lost)))
        assert np.array_equal(again.tokens, wanted.tokens)
        assert second.report().prefilled > before
        await second.close()

    asyncio.run(main())


def test_weights_whose_object_is_gone_cannot_be_fetched(lost: Any) -> None:
    version = RayWeightsRef(0, "full", weights().checksum, 1.0, lost)
    with pytest.raises(LostObjectError, match="version 0 cannot be fetched"):
        version.fetch(timeout_s=10.0)
