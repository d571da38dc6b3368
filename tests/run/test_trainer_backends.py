"""What the loop may expect of whoever trains: the same of every trainer_backend."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray_cases import small_cluster

from stretto.cluster.rank_group import RankGroup, RankOptions
from stretto.cluster.trainer import RankedTrainer
from stretto.errors import StalledError, TrainerError
from stretto.local.trainer import ThreadedTrainer
from stretto.run.protocols import TrainerBackend
from stretto.training.fake import BASE_CHECKSUM, FakeTrainer
from stretto.training.parallel import Ranks
from stretto.types import Batch, Completion, Sample, UpdateReport, Weights

Make = Callable[..., TrainerBackend]


FAILS, HANGS = 98, 99  # first tokens of batches
DEADLINE_S = 2.0  # of a trainer_backend that is to be caught at hanging


def fake_trainer(ranks: Ranks) -> FakeTrainer:
    return Obedient()


class Obedient(FakeTrainer):
    """Does as the batch says."""

    def update(self, batch: Batch) -> UpdateReport:
        if (first := int(batch.samples[0].completion.tokens[0])) == FAILS:
            raise ValueError("told to fail")
        if first == HANGS:
            time.sleep(3 * DEADLINE_S)
        return super().update(batch)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Two ranks, which all tests share because a process takes long to start."""
    with small_cluster():
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this file
        made = RankGroup(RankOptions(fake_trainer, count=2, cpus=0.1), deadline_s=200.0)
        asyncio.run(made.start())
        yield made
        made.close()


@pytest.fixture(params=["thread", "ranks"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes backend at version 0; where they share their ranks, one after the other."""
    made: list[ThreadedTrainer] = []
    if request.param == "thread":

        def maker(deadline_s: float = 60.0) -> TrainerBackend:
            made.append(ThreadedTrainer(fake_trainer(Ranks()), 1, deadline_s=deadline_s))
            return made[-1]
    else:
        group: RankGroup = request.getfixturevalue("group")
        FakeTrainer().save(tmp_path / "first")

        def maker(deadline_s: float = 60.0) -> TrainerBackend:
            trainer_backend = Borrowed(RankOptions(fake_trainer, count=2), deadline_s=deadline_s)
            asyncio.run(group.load(tmp_path / "first"))
            group.deadline_s = deadline_s
            trainer_backend.take(group)
            return trainer_backend

    yield maker
    for trainer_backend in made:
        trainer_backend.close()


class Borrowed(RankedTrainer):
    """A trainer_backend over ranks that others use after it."""

    def take(self, group: RankGroup) -> None:
        self._group = group

    def close(self) -> None:
        self._group = None


def run(trainer_backend: TrainerBackend, work: Callable[[TrainerBackend], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(trainer_backend)

    asyncio.run(main())


def batch(update: int = 0, token: int = 1) -> Batch:
    done = Completion(0, update, np.array([token, 2], np.int32), np.zeros(2, np.float32), "stop", "")
    return Batch(update, [Sample(0, 0, update, (1,), done, 1.0)])


def test_an_update_gives_its_report_and_the_weights_of_the_next_version(make: Make) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        first = await trainer_backend.weights(0)
        report, made = await trainer_backend.update(batch(0))
        assert (report.update, first.version, made.version) == (0, 0, 1)
        assert made.checksum != first.checksum
        assert (await trainer_backend.weights(1)).checksum == made.checksum
        assert trainer_backend.kv_given_back == 0
        assert await trainer_backend.base_checksum() == BASE_CHECKSUM

    run(make(), work)


def test_the_same_batches_make_the_same_weights(make: Make) -> None:
    found: list[str] = []

    async def work(trainer_backend: TrainerBackend) -> None:
        await trainer_backend.update(batch(0, token=5))
        found.append((await trainer_backend.update(batch(1, token=6)))[1].checksum)

    run(make(), work)
    run(make(), work)
    assert found[0] == found[1]


def test_weights_of_a_version_that_it_does_not_hold_are_an_error(make: Make) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        with pytest.raises(TrainerError, match="version 3"):
            await trainer_backend.weights(3)

    run(make(), work)


def test_a_state_that_is_saved_is_that_between_the_updates_around_it(make: Make, tmp_path: Path) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        _, one = await trainer_backend.update(batch(0))
        saving = asyncio.ensure_future(trainer_backend.save(tmp_path / "state"))
        await asyncio.sleep(0)
        _, two = await trainer_backend.update(batch(1))
        await saving
        await trainer_backend.load(tmp_path / "state")
        assert (await trainer_backend.weights(1)).checksum == one.checksum
        _, again = await trainer_backend.update(batch(1))
        assert again.checksum == two.checksum

    run(make(), work)


def test_an_update_waits_for_the_copy_of_a_state_and_not_for_the_disk(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Slow(FakeTrainer):
        def capture(self) -> Callable[[Path], None]:
            write = super().capture()

            def slowly(folder: Path) -> None:
                assert go_on.wait(20)
                write(folder)

            return slowly

    async def work(trainer_backend: TrainerBackend) -> None:
        saving = asyncio.ensure_future(trainer_backend.save(tmp_path / "state"))
        await asyncio.sleep(0)
        await trainer_backend.update(batch(0))
        assert not saving.done()
        go_on.set()
        await saving

    run(ThreadedTrainer(Slow(), 1, deadline_s=20.0), work)
    again = FakeTrainer()
    again.load(tmp_path / "state")
    assert again.version == 0


def test_what_one_seat_saved_another_goes_on_from(make: Make, tmp_path: Path) -> None:
    found: list[str] = []

    async def first(trainer_backend: TrainerBackend) -> None:
        await trainer_backend.update(batch(0))
        await trainer_backend.save(tmp_path / "state")
        found.append((await trainer_backend.update(batch(1)))[1].checksum)

    async def second(trainer_backend: TrainerBackend) -> None:
        await trainer_backend.load(tmp_path / "state")
        found.append((await trainer_backend.update(batch(1)))[1].checksum)

    run(make(), first)
    run(make(), second)
    assert found[0] == found[1]


def test_weights_that_are_adopted_are_the_policys_own_from_then_on(make: Make) -> None:
    recorded: list[Weights] = []

    async def record(trainer_backend: TrainerBackend) -> None:
        recorded.append((await trainer_backend.update(batch(0, token=7)))[1])

    async def work(trainer_backend: TrainerBackend) -> None:
        _, own = await trainer_backend.update(batch(0, token=8))
        assert own.checksum != recorded[0].checksum
        await trainer_backend.adopt(recorded[0])
        assert (await trainer_backend.weights(1)).checksum == recorded[0].checksum

    run(make(), record)
    run(make(), work)


def test_weights_of_another_version_are_not_adopted(make: Make) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        first = await trainer_backend.weights(0)
        _, made = await trainer_backend.update(batch(0))
        with pytest.raises(TrainerError, match="version 0"):
            await trainer_backend.adopt(first)
        assert (await trainer_backend.weights(1)).checksum == made.checksum

    run(make(), work)


def test_what_is_exported_is_in_the_folder(make: Make, tmp_path: Path) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        await trainer_backend.export(tmp_path / "policy")
        assert list((tmp_path / "policy").iterdir())

    run(make(), work)


def test_an_update_that_fails_is_an_error_by_name_and_changes_nothing(make: Make) -> None:
    async def work(trainer_backend: TrainerBackend) -> None:
        before = await trainer_backend.weights(0)
        with pytest.raises(TrainerError, match="update 0 failed: ValueError: told to fail"):
            await trainer_backend.update(batch(0, token=FAILS))
        assert (await trainer_backend.weights(0)).checksum == before.checksum

    run(make(), work)


def test_a_seat_is_closed_twice_without_harm(make: Make) -> None:
    trainer_backend = make()
    trainer_backend.close()
    trainer_backend.close()


def test_an_update_that_does_not_end_is_a_stall_by_name(make: Make) -> None:
    """The last one: ranks that hang are ended, and nobody borrows them afterwards."""

    async def work(trainer_backend: TrainerBackend) -> None:
        with pytest.raises(StalledError, match="update 0 has not ended after 2 s"):
            await trainer_backend.update(batch(0, token=HANGS))

    run(make(DEADLINE_S), work)
