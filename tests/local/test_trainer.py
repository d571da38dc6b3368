"""An update that finds no memory: the engine gives KV back, and it is made again."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.engines.fake import FakeEngine
from stretto.engines.native.capture_lock import CAPTURE
from stretto.errors import EngineError, RunError, TrainerError
from stretto.local.trainer import KEPT_SHARE, RETRIES, ThreadedTrainer
from stretto.training.fake import FakeTrainer
from stretto.types import Batch, Completion, Sample, UpdateReport, Weights


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the free memory of a GPU, where there is one."""
    monkeypatch.setattr("stretto.local.trainer._release_cached", lambda: None)


def batch(update: int = 0, tokens: int = 2) -> Batch:
    """A batch of sequences of up to 1,024 tokens, `tokens` in all."""
    samples = []
    for id in range(-(-tokens // 1024)):
        count = min(1024, tokens - 1024 * id) - 1
        done = Completion(id, update, np.ones(count, np.int32), np.zeros(count, np.float32), "stop", "")
        samples.append(Sample(id, 0, update, (1,), done, 1.0))
    return Batch(update, samples)


class Activations:
    """Something that an update makes."""


class Hungry(FakeTrainer):
    """Runs out of memory `updates` times in an update, and `copies` times while it copies weights."""

    def __init__(self, updates: int = 0, copies: int = 0) -> None:
        super().__init__()
        self.updates, self.copies, self.tries = updates, copies, 0
        self.left_alive: list[bool] = []
        self._made: weakref.ref[Activations] | None = None

    def update(self, batch: Batch) -> UpdateReport:
        self.tries += 1
        if self._made is not None:
            self.left_alive.append(self._made() is not None)
        held = Activations()
        self._made = weakref.ref(held)
        if self.tries <= self.updates:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand much more")
        return super().update(batch)

    def weights(self, version: int) -> Weights:
        if self.copies:
            self.copies -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return super().weights(version)


def updated(
    trainer: FakeTrainer, engine: FakeEngine | None, tokens: int = 2
) -> tuple[UpdateReport, Weights, ThreadedTrainer, list[str]]:
    async def main() -> tuple[UpdateReport, Weights, ThreadedTrainer, list[str]]:
        notices: list[str] = []
        engines = [] if engine is None else [engine]
        role = ThreadedTrainer(trainer, 1, deadline_s=10.0, engine_s=0.2, engines=engines, notice=notices.append)
        try:
            report, weights = await role.update(batch(tokens=tokens))
        finally:
            role.close()
            for each in engines:
                await each.close()
        return report, weights, role, notices

    return asyncio.run(main())


def test_the_engine_gives_kv_back_and_the_update_is_made_again() -> None:
    trainer, engine = Hungry(updates=1), FakeEngine(kv_tokens=100_000, max_context=1000)
    report, weights, role, notices = updated(trainer, engine)
    assert (report.update, weights.version, trainer.tries, len(trainer.batches)) == (0, 1, 2, 1)
    assert engine.capacity.kv_tokens == int(KEPT_SHARE * 100_000)
    assert role.kv_given_back == 100_000 - engine.capacity.kv_tokens
    assert notices == [
        "update 0 ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB): the engine keeps 70,000 of "
        "100,000 tokens of KV; try 2 of 4"
    ]


class Packing(Hungry):
    """A trainer that packs micro-batches, and needs memory for their tokens."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits = fits

    @property
    def micro_tokens(self) -> int:
        return 8192

    def update(self, batch: Batch) -> UpdateReport:
        self.updates = self.tries + ((batch.micro_tokens or self.micro_tokens) > self.fits and self.tries < 5)
        return super().update(batch)


def test_micro_batches_are_halved_before_the_engine_gives_anything_back() -> None:
    trainer, engine = Packing(fits=2048), FakeEngine(kv_tokens=100_000, max_context=1000)
    _, _, role, notices = updated(trainer, engine, tokens=8192)
    assert role.kv_given_back == 0
    assert [one.micro_tokens for one in trainer.batches] == [2046]  # a quarter of 8,184 tokens of input
    assert ["at most 4,092 tokens" in notices[0], "at most 2,046 tokens" in notices[1], len(notices)] == [True, True, 2]


def test_smaller_micro_batches_are_kept_and_a_batch_that_names_its_own_has_them() -> None:
    trainer = Packing(fits=4096)

    async def main() -> None:
        role = ThreadedTrainer(trainer, 1, deadline_s=10.0, notice=lambda text: None)
        try:
            await role.update(batch(0, 8192))
            await role.update(batch(1))
            await role.update(replace(batch(2), micro_tokens=512))
            await role.update(batch(3))
        finally:
            role.close()

    asyncio.run(main())
    assert [one.micro_tokens for one in trainer.batches] == [4092, 4092, 512, 4092]
    assert [one.lowered for one in trainer.batches] == [True, True, False, True]
    assert trainer.tries == 5


def test_an_update_that_is_trained_again_keeps_later_ones_small_only_if_it_had_run_out_of_memory() -> None:
    trainer, notices = Packing(fits=8192), list[str]()

    async def main() -> None:
        role = ThreadedTrainer(trainer, 1, deadline_s=10.0, notice=notices.append)
        try:
            await role.update(replace(batch(0), micro_tokens=64))  # the recipe asked for 64 then, and for 8192 now
            await role.update(batch(1))
            await role.update(replace(batch(2), micro_tokens=2048, lowered=True))
            await role.update(batch(3))
        finally:
            role.close()

    asyncio.run(main())
    assert [one.micro_tokens for one in trainer.batches] == [64, None, 2048, 2048]
    assert notices == ["micro-batches have at most 2,048 tokens: update 2 ran out of memory with more, before"]


def test_kv_is_given_back_if_small_micro_batches_do_not_fit_either() -> None:
    trainer, engine = Packing(fits=0), FakeEngine(kv_tokens=2000, max_context=1500)
    _, _, role, notices = updated(trainer, engine, tokens=8192)
    assert (trainer.tries, role.kv_given_back) == (6, 500)
    assert ["micro-batches" in text for text in notices] == [True, True, False, False, False]


def test_micro_batches_are_not_made_smaller_than_a_sequence_which_is_never_cut() -> None:
    trainer = Packing(fits=0)
    trainer.tries = 4
    long = Completion(0, 0, np.ones(6000, np.int32), np.zeros(6000, np.float32), "stop", "")
    samples = [Sample(id, 0, 0, (1,), replace(long, id=id), 1.0) for id in range(2)]
    assert trainer.smaller_micro_batches(Batch(0, samples)) is None
    assert trainer.smaller_micro_batches(Batch(0, samples, micro_tokens=16_384)) == 6_000
    unequal = [samples[0], replace(samples[1], prompt=(1,) * 3001)]  # 6,000 and 9,000 tokens
    assert trainer.smaller_micro_batches(Batch(0, unequal, micro_tokens=16_384)) == 9_000
    assert trainer.smaller_micro_batches(Batch(0, unequal, micro_tokens=9_000)) is None


def test_a_batch_that_is_one_small_micro_batch_is_not_cut_further() -> None:
    trainer = Packing(fits=0)
    trainer.tries = 4  # the next fails and the one after fits
    _, _, role, notices = updated(trainer, FakeEngine(kv_tokens=100_000, max_context=1000))
    assert role.kv_given_back > 0
    assert all("micro-batches" not in text for text in notices)


def test_nothing_that_a_failed_try_had_made_is_alive_in_the_next() -> None:
    trainer = Hungry(updates=2)
    updated(trainer, FakeEngine())
    assert trainer.left_alive == [False, False]


def test_weights_that_find_no_memory_are_copied_again_and_the_update_is_not() -> None:
    trainer = Hungry(copies=2)
    _, weights, role, notices = updated(trainer, FakeEngine(kv_tokens=100_000, max_context=1000))
    assert (trainer.tries, weights.version, len(notices)) == (1, 1, 2)
    assert role.kv_given_back == 100_000 - int(KEPT_SHARE * int(KEPT_SHARE * 100_000))


def test_after_the_last_try_the_error_has_the_numbers_and_the_options() -> None:
    trainer, engine = Hungry(updates=RETRIES + 1), FakeEngine(kv_tokens=2000, max_context=1500)
    with pytest.raises(TrainerError) as failed:
        updated(trainer, engine)
    assert trainer.tries == RETRIES + 1
    said = str(failed.value)
    assert "update 0 ran out of memory 4 times" in said
    assert "500 tokens of KV back" in said, "never below what the longest request needs"
    assert "Tried to allocate 2.00 GiB." in said
    assert "`training.micro_tokens`" in said
    assert trainer.version == 0


def test_an_engine_that_has_nothing_to_give_back_is_told_as_such() -> None:
    trainer, engine = Hungry(updates=1), FakeEngine(kv_tokens=1000, max_context=1000)
    _, _, role, notices = updated(trainer, engine)
    assert role.kv_given_back == 0
    assert "the engine has no KV to give back, its longest trajectory needs all 1,000 tokens; try 2 of 4" in notices[0]
    with pytest.raises(TrainerError, match=r"4 times, and no engine has KV to give back: .* 2.00 GiB\. Lower"):
        updated(Hungry(updates=RETRIES + 1), FakeEngine(kv_tokens=1000, max_context=1000))


def test_without_an_engine_there_is_still_another_try() -> None:
    _, _, role, notices = updated(Hungry(updates=1), None)
    assert role.kv_given_back == 0
    assert "no engine that could give any back" in notices[0]


def test_an_engine_that_does_not_answer_or_is_lost_is_left_out() -> None:
    class Stuck(FakeEngine):
        async def shrink(self, share: float) -> int:
            await asyncio.sleep(3600)
            return 0

    class Lost(FakeEngine):
        async def shrink(self, share: float) -> int:
            raise EngineError("gone")

    _, weights, _, notices = updated(Hungry(updates=1), Stuck())
    assert weights.version == 1
    assert "an engine has not given any back after 0.2 s (`runtime.instance_seconds`)" in notices[0]
    _, weights, _, notices = updated(Hungry(updates=1), Lost())
    assert weights.version == 1
    assert "an engine that is lost gives none back (gone)" in notices[0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_state_that_cannot_be_written_is_no_failure_of_the_trainer(error: Exception, tmp_path: Path) -> None:
    class Full(FakeTrainer):
        def capture(self) -> Callable[[Path], None]:
            def write(folder: Path) -> None:
                raise error

            return write

    async def main() -> None:
        role = ThreadedTrainer(Full(), 1, deadline_s=10.0)
        try:
            with pytest.raises(RunError, match="the trainer's state cannot be written"):
                await role.save(tmp_path)
            assert (await role.weights(0)).version == 0
        finally:
            role.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("on_a_gpu", "is_warm", "captures"),
    [(True, False, [False, True]), (True, True, [True, True]), (False, False, [True, True])],
)
def test_no_engine_captures_while_the_first_update_compiles(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool, is_warm: bool, captures: list[bool]
) -> None:
    found: list[bool] = []

    def engine() -> None:
        found.append(CAPTURE.acquire(blocking=False))
        if found[-1]:
            CAPTURE.release()

    class Watched(FakeTrainer):
        def update(self, batch: Batch) -> UpdateReport:
            thread = threading.Thread(target=engine)
            thread.start()
            thread.join()
            return super().update(batch)

    async def main() -> None:
        role = ThreadedTrainer(Watched(), 1, deadline_s=10.0, is_warm=is_warm)
        try:
            for update in range(2):
                await role.update(batch(update))
        finally:
            role.close()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_a_gpu)
    asyncio.run(main())
    assert found == captures


def test_an_update_that_meets_a_capture_is_run_again_when_nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlucky(FakeTrainer):
        tries = 0

        def update(self, batch: Batch) -> UpdateReport:
            self.tries += 1
            if self.tries == 1:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return super().update(batch)

    async def main() -> UpdateReport:
        role = ThreadedTrainer(trainer, 1, deadline_s=10.0, is_warm=True)
        try:
            return (await role.update(batch(0)))[0]
        finally:
            role.close()

    trainer = Unlucky()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert asyncio.run(main()).update == 0
    assert trainer.tries == 2


def test_other_errors_are_not_tried_again() -> None:
    class Broken(Hungry):
        def update(self, batch: Batch) -> UpdateReport:
            self.tries += 1
            raise RuntimeError("out of memory")

    trainer = Broken()
    with pytest.raises(TrainerError, match=r"update 0 failed: RuntimeError: out of memory"):
        updated(trainer, FakeEngine())
    assert trainer.tries == 1


def test_code_that_would_end_the_driver_is_an_error_of_the_update() -> None:
    class Exits(FakeTrainer):
        def update(self, batch: Batch) -> UpdateReport:
            raise SystemExit(0)

    with pytest.raises(TrainerError, match="update 0 ended with SystemExit: 0"):
        updated(Exits(), None)


def test_anything_else_that_finds_no_memory_is_an_error_by_name() -> None:
    async def main() -> None:
        role = ThreadedTrainer(Hungry(copies=1), 1, deadline_s=10.0)
        try:
            with pytest.raises(TrainerError, match=r"weights of version 0 ran out of memory: .* 1.00 GiB\. Lower"):
                await role.weights(0)
        finally:
            role.close()

    asyncio.run(main())


def test_what_was_handed_over_is_not_kept_by_the_trainers_thread() -> None:
    async def main() -> None:
        role = ThreadedTrainer(FakeTrainer(), 1, deadline_s=10.0)
        weights = await role.weights(0)
        alive = weakref.ref(weights.tensors["values"])
        del weights
        for _ in range(500):  # the thread may be on its way out of the call
            gc.collect()
            if alive() is None:
                break
            await asyncio.sleep(0.01)
        assert alive() is None
        role.close()

    asyncio.run(main())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_that_are_handed_over_can_be_read_on_any_stream() -> None:
    class Slow(FakeTrainer):
        def weights(self, version: int) -> Weights:
            big = torch.ones(4096, 4096, device="cuda")
            for _ in range(200):
                big = (big @ big).clamp_(0, 1)
            return Weights(version, "lora", {"values": big}, "")

    async def main() -> None:
        role = ThreadedTrainer(Slow(), 1, deadline_s=60.0)
        weights = await role.weights(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert bool((weights.tensors["values"] == 1).all())
        role.close()

    asyncio.run(main())
