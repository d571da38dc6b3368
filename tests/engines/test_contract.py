"""The contract of `stretto.engines.protocol`, for every engine that ships, through the asynchronous protocol."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import RANK, prompt_of, sets_of, weights_of
from vllm_cases import Children, options_of, probed_weights

from stretto.engines.fake import FakeEngine, FakeSteppedEngine
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import ThreadedEngine
from stretto.errors import (
    AbortedError,
    ChecksumError,
    EngineError,
    RequestError,
    StrettoError,
    SuspendedError,
    VersionNotResidentError,
)
from stretto.types import Completion, Request, Sampling, Weights

if TYPE_CHECKING:
    from ray_cases import Processes  # a machine without Ray tests the other engines


class Bench:
    """Makes engines of one kind, and weights for them."""

    def __init__(
        self,
        kind: str,
        model: Any,
        processes: Processes | None = None,
        children: Children | None = None,
        folder: Path | None = None,
    ) -> None:
        self.kind, self.model, self.processes, self.children, self.folder = kind, model, processes, children, folder

    def engine(self) -> Any:
        if self.processes is not None:
            return self.processes.engine(_lora_core_of(self.model))
        if self.children is not None:
            return self.children.engine(options_of(str(self.folder)))
        if self.kind == "fake":
            return FakeEngine(slots=2, rows=8, kv_tokens=2048, max_context=512, median_tokens=60.0, step_s=0.0005)
        options: dict[str, Any] = {"lora_rank": RANK} if self.kind == "lora" else {}
        return ThreadedEngine(
            lambda: NativeEngine(
                self.model, kind=self.kind, slots=2, rows=8, kv_tokens=2048, max_context=512, **options
            ),
            threads=1,
        )

    def weights(self, version: int) -> Weights:
        if self.children is not None:
            return probed_weights("lora", self.model, version, fake=self.kind == "vllm-fake")
        return weights_of("full" if self.kind == "full" else "lora", self.model, version)


def _lora_core_of(model: Any) -> Callable[[], NativeEngine]:
    return lambda: NativeEngine(model, kind="lora", slots=2, rows=8, kv_tokens=2048, max_context=512, lora_rank=RANK)


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    pytest.importorskip("ray")
    from ray_cases import Processes, small_cluster

    with small_cluster():
        made = Processes()
        yield made
        made.close()


@pytest.fixture(params=["fake", "lora", "full", "ray", "vllm-fake", "vllm"])
def bench(request: pytest.FixtureRequest, model: Any) -> Iterator[Bench]:
    if request.param.startswith("vllm"):
        if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here: `make test-vllm`")
        name = "fake_children" if request.param == "vllm-fake" else "vllm_children"
        yield Bench(
            request.param,
            model,
            children=request.getfixturevalue(name),
            folder=request.getfixturevalue("model_folder"),
        )
        return
    if request.param != "ray":
        yield Bench(request.param, model)
        return
    processes: Processes = request.getfixturevalue("processes")
    with processes.spared():
        yield Bench(request.param, model, processes)


def request_of(number: int, version: int = 0, tokens: int = 24, **options: Any) -> Request:
    how = Sampling(tokens, **{k: options.pop(k) for k in list(options) if k in Sampling.__slots__})
    return Request(number, version, prompt_of(11, options.pop("prompt", 1)), 77 + number, how, **options)


def same(left: Completion, right: Completion, *, exact: bool = True) -> bool:
    """The same tokens and log-probabilities; without `exact`, these to rounding in float32."""
    if not np.array_equal(left.tokens, right.tokens):
        return False
    if not exact:
        return np.allclose(left.logprobs, right.logprobs, atol=1e-4)
    return np.array_equal(left.logprobs, right.logprobs)


def test_a_request_comes_back_whole_and_stamped(bench: Bench) -> None:
    async def main() -> None:
        engine, weights = bench.engine(), bench.weights(0)
        receipt = await engine.load(weights)
        before = time.time()
        done = await engine.generate(request_of(3))
        assert (receipt is not None) == (engine.capabilities.confirms == "receipt")
        assert done.receipts == (() if receipt is None else (receipt.id,))
        if receipt is not None:
            assert (receipt.version, receipt.checksum) == (0, weights.checksum)
            assert receipt.mean_difference <= receipt.tolerance
        assert (done.id, done.version, done.checksum) == (3, 0, weights.checksum)
        assert done.tokens.dtype == np.int32
        assert done.logprobs.dtype == np.float32
        assert 1 <= len(done.tokens) == len(done.logprobs) <= 24
        assert (done.finish == "length") == (len(done.tokens) == 24)
        assert (done.logprobs <= 0).all()
        assert before <= done.started_at <= done.finished_at
        assert done.token_versions is None
        load = engine.report()
        assert (load.running, load.queued, dict(load.versions)) == (0, 0, {0: 0})
        assert load.tokens >= len(done.tokens)
        assert load.busy_s > 0
        assert load.row_s > 0
        await engine.close()

    asyncio.run(main())


def test_what_is_generated_depends_on_prompt_version_seed_and_sampling_alone(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        await engine.load(bench.weights(1))
        alone = [await engine.generate(request_of(i, i % 2)) for i in range(4)]
        crowd = await asyncio.gather(*(engine.generate(request_of(i, i % 2, group=i % 2)) for i in range(20)))
        exact = engine.capabilities.exact
        assert all(same(a, c, exact=exact) for a, c in zip(alone, crowd, strict=False))
        other = await engine.generate(replace(request_of(0), seed=5))
        assert not same(other, alone[0])
        assert not same(await engine.generate(replace(request_of(0), version=1)), alone[0])
        await engine.close()

    asyncio.run(main())


def test_truncated_sampling_tells_what_each_token_was_drawn_from(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        if not engine.capabilities.records_supports:
            with pytest.raises(RequestError, match="`top_k`"):
                await engine.generate(request_of(0, top_k=5))
            assert (await engine.generate(request_of(1, top_k=5, supports=False))).supports is None
            await engine.close()
            return
        done = await engine.generate(request_of(0, top_k=5))
        assert done.supports is not None
        supports = sets_of(done.supports)
        assert len(supports) == len(done.tokens)
        for token, support in zip(done.tokens.tolist(), supports, strict=True):
            assert token in support
            assert len(support) == 5
        for plain in ({}, {"top_k": 5, "temperature": 0.0}, {"top_k": 5, "supports": False}):
            assert (await engine.generate(request_of(1, **plain))).supports is None
        await engine.close()

    asyncio.run(main())


def test_supports_survive_a_suspension(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        if not engine.capabilities.records_supports:
            await engine.close()
            return
        work = request_of(2, tokens=200, top_k=3)
        expected = await engine.generate(work)
        assert expected.supports is not None
        running = asyncio.create_task(engine.generate(work))
        while engine.report().longest.get(0, 0) < 2:
            await asyncio.sleep(0.001)
        (out,) = await engine.suspend([2], kv=True)
        with pytest.raises(SuspendedError):
            await running
        assert out.supports is not None
        assert len(out.supports) == len(out.tokens)
        done = await engine.resume(pickle.loads(pickle.dumps(out)))
        assert done.supports is not None
        assert np.array_equal(done.supports.counts, expected.supports.counts)
        assert np.array_equal(done.supports.tokens, expected.supports.tokens)
        await engine.close()

    asyncio.run(main())


def test_a_version_that_is_not_resident_is_refused(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        with pytest.raises(VersionNotResidentError, match="version 4"):
            await engine.generate(request_of(0, 4))
        with pytest.raises(VersionNotResidentError):
            await engine.unload(4)
        assert await engine.generate(request_of(0))
        await engine.close()

    asyncio.run(main())


def test_damaged_weights_are_refused_and_nothing_is_held(bench: Bench) -> None:
    async def main() -> None:
        engine, good = bench.engine(), bench.weights(0)
        name = next(iter(good.tensors))
        damaged = good.tensors[name].clone()
        damaged.view(-1)[0] += 1e-3
        with pytest.raises(ChecksumError):
            await engine.load(replace(good, tensors={**good.tensors, name: damaged}))
        with pytest.raises(VersionNotResidentError):
            await engine.generate(request_of(0))
        await engine.load(good)
        assert (await engine.generate(request_of(0))).checksum == good.checksum
        await engine.close()

    asyncio.run(main())


class Elsewhere:
    """Weights that have to be fetched."""

    def __init__(self, weights: Weights) -> None:
        self.version, self.checksum, self._weights = weights.version, weights.checksum, weights
        self.fetched = 0

    def fetch(self) -> Weights:
        self.fetched += 1
        return self._weights

    def store(self, folder: Path) -> bool:
        return False

    async def recreate(self) -> None:
        raise AssertionError("they are not lost")


def test_weights_that_lie_elsewhere_are_fetched(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        first, second = Elsewhere(bench.weights(0)), Elsewhere(bench.weights(1))
        await engine.load(first)
        assert (await engine.generate(request_of(0))).checksum == first.checksum
        await (engine.swap(0, second) if engine.capabilities.swaps else engine.load(second))
        assert (await engine.generate(request_of(1, 1))).checksum == second.checksum
        assert (first.fetched, second.fetched) == (1, 1)
        await engine.close()

    asyncio.run(main())


def test_slots_are_finite_and_a_version_in_use_stays(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        await engine.load(bench.weights(1))
        with pytest.raises(StrettoError, match=r"version 2: all 2 slots hold \[0, 1\]"):
            await engine.load(bench.weights(2))
        running = asyncio.ensure_future(engine.generate(request_of(0, 0, 200)))
        await asyncio.sleep(0.005)
        with pytest.raises(StrettoError, match="version 0"):
            await engine.unload(0)
        await engine.unload(1)
        await engine.load(bench.weights(2))
        await running
        await engine.unload(0)
        await engine.close()

    asyncio.run(main())


def test_too_long_a_request_is_refused_with_the_numbers(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        with pytest.raises(RequestError, match="may grow to 521 tokens"):
            await engine.generate(request_of(0, tokens=510))
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("kv", [True, False])
def test_suspended_trajectories_go_on_elsewhere(bench: Bench, kv: bool) -> None:
    async def main() -> None:
        first, second = bench.engine(), bench.engine()
        for engine in (first, second):
            await engine.load(bench.weights(0))
        wanted = await first.generate(request_of(0, tokens=100))
        running = [asyncio.ensure_future(first.generate(request_of(i, tokens=100))) for i in range(12)]
        while first.report().tokens < 60 + len(wanted.tokens):
            await asyncio.sleep(0.001)
        taken = await first.suspend([*range(12), 99], kv=kv)
        ended = await asyncio.gather(*running, return_exceptions=True)
        gone = [i for i, e in enumerate(ended) if isinstance(e, SuspendedError)]
        assert gone == sorted(s.request.id for s in taken)
        assert len(gone) >= 4
        if not (kv and first.capabilities.carries_kv):
            assert all(each.kv is None for each in taken)
        assert first.report().running == first.report().queued == 0
        taken = pickle.loads(pickle.dumps(taken))
        done = await asyncio.gather(*(second.resume(s) for s in taken))
        everything = {c.id: c for c in [*done, *(e for e in ended if isinstance(e, Completion))]}
        assert sorted(everything) == list(range(12))
        for suspended in taken:
            tokens = everything[suspended.request.id].tokens
            assert np.array_equal(tokens[: len(suspended.tokens)], suspended.tokens)
        if kv and first.capabilities.same_draws:
            assert same(everything[0], wanted)
        if first.capabilities.confirms == "receipt":  # of both engines
            assert all(len(done.receipts) == 2 for done in everything.values() if done.id in gone)
        await first.close()
        await second.close()

    asyncio.run(main())


def test_an_engine_that_shrinks_goes_on_with_every_trajectory_to_the_same_end(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        wanted = await asyncio.gather(*(engine.generate(request_of(i, tokens=100)) for i in range(12)))
        before = engine.report().tokens
        running = [asyncio.ensure_future(engine.generate(request_of(i, tokens=100))) for i in range(12)]
        while engine.report().tokens < before + 60:
            await asyncio.sleep(0.001)
        assert engine.capacity.kv_tokens == 2048
        assert await engine.shrink(1.0) == 2048
        if not engine.capabilities.shrinks:
            assert await engine.shrink(0.5) == engine.capacity.kv_tokens == 2048
            exact = engine.capabilities.exact
            assert all(same(a, b, exact=exact) for a, b in zip(wanted, await asyncio.gather(*running), strict=True))
            await engine.close()
            return
        assert await engine.shrink(0.5) == engine.capacity.kv_tokens == 1024
        assert await engine.shrink(0.01) == engine.capacity.kv_tokens == 512, "what the longest request needs"
        assert (engine.capacity.slots, engine.capacity.rows, engine.capacity.max_context) == (2, 8, 512)
        done = await asyncio.gather(*running)
        assert all(same(a, b) for a, b in zip(wanted, done, strict=True))
        longest = await engine.generate(request_of(0, tokens=501))
        assert 1 <= len(longest.tokens) <= 501
        assert engine.report().kv_tokens <= 512 + 32  # what is kept of prompts is within the budget too
        with pytest.raises(RequestError, match="may grow to 521 tokens"):
            await engine.generate(request_of(1, tokens=510))
        with pytest.raises(ValueError, match=r"`share = 0"):
            await engine.shrink(0.0)
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_knows_its_longest_trajectory_keeps_room_for_that_alone() -> None:
    async def main() -> None:
        core = FakeSteppedEngine(slots=2, rows=8, kv_tokens=2048, max_context=4096, median_tokens=4.0)
        engine = ThreadedEngine(lambda: core, longest=200)
        await engine.load(Weights(0, "full", {}, ""))
        assert await engine.shrink(0.01) == engine.capacity.kv_tokens == 200
        await engine.close()
        core = FakeSteppedEngine(slots=2, rows=8, kv_tokens=2048, max_context=4096, median_tokens=4.0)
        engine = ThreadedEngine(lambda: core, longest=200)
        await engine.load(Weights(0, "full", {}, ""))
        await engine.generate(Request(0, 0, (1,) * 11, 0, Sampling(289)))
        assert await engine.shrink(0.01) == 300, "one was longer than expected"
        await engine.close()

    asyncio.run(main())


def test_aborted_trajectories_end_at_once(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        running = [asyncio.ensure_future(engine.generate(request_of(i, tokens=200))) for i in range(12)]
        await asyncio.sleep(0.005)
        await engine.abort([*range(12), 50])
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(e, AbortedError | Completion) for e in ended)
        assert any(isinstance(e, AbortedError) for e in ended)
        await engine.unload(0)
        await engine.close()

    asyncio.run(main())


def test_a_cancelled_call_leaves_no_orphan(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        running = asyncio.ensure_future(engine.generate(request_of(0, tokens=200)))
        await asyncio.sleep(0.003)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.abort([])
        assert engine.report().running == engine.report().queued == 0
        await engine.close()

    asyncio.run(main())


def test_a_swap_goes_on_under_the_new_weights_and_says_so(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        plain = await asyncio.gather(*(engine.generate(request_of(i, tokens=80)) for i in range(12)))
        before = engine.report().tokens
        running = [asyncio.ensure_future(engine.generate(request_of(i, tokens=80, group=0))) for i in range(12)]
        while engine.report().tokens < before + 60:
            await asyncio.sleep(0.001)
        new = bench.weights(1)
        if not engine.capabilities.swaps:
            with pytest.raises(RequestError, match="version 0 cannot be swapped for version 1"):
                await engine.swap(0, new)
            assert {done.version for done in await asyncio.gather(*running)} == {0}
            await engine.close()
            return
        await engine.swap(0, new)
        done = await asyncio.gather(*running)
        assert dict(engine.report().versions) == {1: 0}
        mixed = [c for c in done if c.token_versions is not None]
        assert mixed
        for completion in mixed:
            versions = completion.token_versions.tolist()
            assert versions == sorted(versions)
            assert completion.version == versions[0] == 0
            assert len(versions) == len(completion.tokens)
            assert completion.checksum == new.checksum
            old = versions.count(0)
            assert np.array_equal(completion.tokens[:old], plain[completion.id].tokens[:old])
        for completion in done:
            if completion.token_versions is None:
                assert completion.version == (1 if completion.checksum == new.checksum else 0)
        with pytest.raises(VersionNotResidentError):
            await engine.generate(request_of(0))
        await engine.close()

    asyncio.run(main())


def test_a_request_that_is_here_already_is_refused(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        both = await asyncio.gather(
            *(engine.generate(request_of(0, tokens=100)) for _ in range(2)), return_exceptions=True
        )
        assert [type(b) for b in both] == [Completion, RequestError]
        await engine.close()

    asyncio.run(main())


def test_a_call_that_is_refused_and_cancelled_ends_nobody_elses_trajectory(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        wanted = await engine.generate(request_of(0, tokens=100))
        first, second = (asyncio.ensure_future(engine.generate(request_of(0, tokens=100))) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        assert same(await first, wanted, exact=engine.capabilities.exact)
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_dies_leaves_no_error_of_which_nobody_hears() -> None:
    began, ended = threading.Event(), threading.Event()

    class Dying(FakeSteppedEngine):
        def step(self) -> Any:
            began.set()
            ended.wait(10.0)
            raise EngineError("dead")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        engine = ThreadedEngine(Dying)
        await engine.load(Weights(0, "full", {}, ""))
        running = asyncio.ensure_future(engine.generate(request_of(0)))
        await asyncio.to_thread(began.wait, 10.0)
        running.cancel()
        await asyncio.wait([running])
        ended.set()
        await engine.close()

    heard: list[Any] = []
    asyncio.run(main())
    gc.collect()
    assert not heard


def test_after_closing_every_call_says_so(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        running = asyncio.ensure_future(engine.generate(request_of(0, tokens=200)))
        await asyncio.sleep(0.003)
        await engine.close()
        await engine.close()
        ended = (await asyncio.gather(running, return_exceptions=True))[0]
        assert isinstance(ended, EngineError | Completion)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request_of(1))

    asyncio.run(main())


def test_an_idle_engine_uses_no_processor_time(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        await engine.generate(request_of(0))
        await asyncio.sleep(0.05)
        spent = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - spent < 0.03
        await engine.close()

    asyncio.run(main())


def test_priority_goes_before_arrival(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        late = [asyncio.ensure_future(engine.generate(request_of(i, tokens=40, priority=1))) for i in range(24)]
        first = [asyncio.ensure_future(engine.generate(request_of(100 + i, tokens=40))) for i in range(8)]
        low = await asyncio.gather(*late)
        high = await asyncio.gather(*first)
        assert np.mean([c.started_at for c in high]) < np.mean([c.started_at for c in low])
        await engine.close()

    asyncio.run(main())


def test_a_turn_waits_only_for_what_was_asked_for_before_it(bench: Bench) -> None:
    """So a trajectory that comes back from its world among many others is not starved."""

    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        asked = [asyncio.ensure_future(engine.generate(request_of(i, tokens=12))) for i in range(24)]
        started = [done.started_at for done in await asyncio.gather(*asked)]
        assert started == sorted(started)
        await engine.close()

    asyncio.run(main())


def test_greedy_has_log_probability_zero(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        await engine.load(bench.weights(0))
        assert not (await engine.generate(request_of(0, temperature=0.0))).logprobs.any()
        await engine.close()

    asyncio.run(main())


def test_a_core_that_cannot_be_made_raises_where_it_is_asked_for() -> None:
    def fail() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        ThreadedEngine(fail)


def test_torch_threads_are_set_for_the_engine_thread_alone(model: Any) -> None:
    seen = []

    def make() -> Any:
        seen.append(torch.get_num_threads())
        return NativeEngine(model, kind="full", slots=1, rows=2, kv_tokens=64, max_context=64)

    async def main() -> None:
        engine = ThreadedEngine(make, threads=1, name="one")
        await engine.close()

    asyncio.run(main())
    assert seen == [1]
