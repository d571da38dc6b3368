"""Ranks that die: noticed, ended, made anew and brought back to where they were; on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray_cases import lost_reference, small_cluster
from run_cases import recipe

import stretto.cluster.rank_group as rank_group
from stretto.cluster.model_files import ModelSource
from stretto.cluster.rank_group import RankOptions, rank_options
from stretto.cluster.trainer import RankedTrainer
from stretto.cluster.weights import PackedWeights, RayWeightsRef, WeightsStore
from stretto.errors import LostObjectError, RunError, TrainerLostError
from stretto.models.loading import load_model
from stretto.run.protocols import TrainerBackend
from stretto.setup.factories import make_trainer
from stretto.store.version_files import VersionFiles
from stretto.training.fake import FakeTrainer
from stretto.training.parallel import Ranks
from stretto.types import Batch, Completion, Sample, UpdateReport, Weights

SLOW = 99  # first token of a batch that takes a while


def batch(update: int = 0, token: int = 1) -> Batch:
    done = Completion(0, update, np.array([token, 2], np.int32), np.zeros(2, np.float32), "stop", "")
    return Batch(update, [Sample(0, 0, update, (1,), done, 1.0)])


class Meeting(FakeTrainer):
    """Meets its peers in every update."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def update(self, batch: Batch) -> UpdateReport:
        if int(batch.samples[0].completion.tokens[0]) == SLOW:
            time.sleep(1.0)
        assert self.ranks.total(np.ones(1)) == self.ranks.count
        return super().update(batch)


BATCHES = [batch(0, 3), batch(1, 4), batch(2, SLOW), batch(3, 5)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this file
    with small_cluster():
        yield


@pytest.fixture(scope="module")
def lost() -> Any:
    """A reference to an object whose owner is dead."""
    return lost_reference()


def expected() -> list[str]:
    """The checksums of the versions that the batches make."""
    trainer, found = FakeTrainer(), []
    for each in BATCHES:
        trainer.update(each)
        found.append(trainer.weights(each.update + 1).checksum)
    return found


async def ends_without_a_way_back(trainer_backend: RankedTrainer) -> None:
    """A lost rank ends a run that has nothing to bring it back from, by name, and soon."""
    bare = RankedTrainer(RankOptions(Meeting, count=2), deadline_s=200.0)
    bare._group = trainer_backend._group
    training = asyncio.create_task(bare.update(batch(4, SLOW)))
    await asyncio.sleep(0.4)
    os.kill(trainer_backend.processes[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(TrainerLostError, match="update 4 failed, and the trainer with it: "):
        await training
    assert time.monotonic() - started < 60
    with pytest.raises(TrainerLostError):
        await bare.update(batch(4))


@pytest.mark.slow
def test_ranks_that_are_killed_are_made_anew_and_come_back_to_their_version(tmp_path: Path) -> None:
    """Killed while they rest and while they train; from a checkpoint of version 1, and what was trained after it."""
    notices: list[str] = []
    restored: list[int] = []

    async def restore(trainer_backend: TrainerBackend, version: int) -> None:
        restored.append(version)
        await trainer_backend.load(tmp_path / "checkpoint")
        for each in BATCHES[1:version]:
            await trainer_backend.update(each)

    async def main() -> list[Weights]:
        trainer_backend = RankedTrainer(
            RankOptions(Meeting, count=2, cpus=0.1), deadline_s=200.0, restore=restore, notice=notices.append
        )
        try:
            made = [(await trainer_backend.update(BATCHES[0]))[1]]
            await trainer_backend.save(tmp_path / "checkpoint")
            first = trainer_backend.processes
            os.kill(first[0], signal.SIGKILL)
            made.append((await trainer_backend.update(BATCHES[1]))[1])
            second = trainer_backend.processes
            assert not set(first) & set(second), "all of them are new"
            training = asyncio.create_task(trainer_backend.update(BATCHES[2]))
            await asyncio.sleep(0.4)
            os.kill(second[1], signal.SIGKILL)
            made.append((await training)[1])
            made.append((await trainer_backend.update(BATCHES[3]))[1])
            for process in second:
                with pytest.raises(ProcessLookupError):
                    os.kill(process, 0)
            assert trainer_backend.restarts == 2
            # The weights of a rank that is gone are still there: they are the driver's.
            handle = made[0]
            assert isinstance(handle, RayWeightsRef)
            assert (await asyncio.to_thread(handle.fetch)).tensors.keys() == {"values"}
            await ends_without_a_way_back(trainer_backend)
            return made
        finally:
            trainer_backend.close()

    made = asyncio.run(main())
    assert [each.checksum for each in made] == expected()
    assert restored == [1, 2]
    assert ["of 4 times" in each for each in notices] == [True, False, True, False]
    assert "rank" in notices[0]
    assert "1 of 4 times" in notices[0]
    assert notices[3] == "the ranks of the trainer are at version 2 again"


class Arriving:
    """A rank that is little but a process, and so starts soon. It dies as it starts if `make` yields a file."""

    def __init__(self, make: Any, rank: int, count: int, threads: int) -> None:
        self.rank = rank
        for death in make():
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def ready(self) -> None:
        pass

    def open(self, timeout_s: float) -> tuple[str, int]:
        return "", 0

    def start(self, host: str, port: int, timeout_s: float) -> tuple[int, int]:
        return 0, os.getpid()

    def load(self, folder: str) -> int:
        if Path(folder).name == "lost":
            if self.rank == 0:
                raise LostObjectError("version 0 cannot be fetched: GetTimeoutError")
            time.sleep(60)
        return int(Path(folder).name)

    def base_checksum(self) -> str:
        return "base"


def arriving(folder: Path, deaths: int = 0, count: int = 1) -> RankOptions:
    for death in range(deaths):
        (folder / f"{death}.death").touch()
    return RankOptions(lambda: folder.glob("*.death"), count, cpus=0.1)  # type: ignore[arg-type,misc] # of `Arriving`


@pytest.mark.parametrize("deaths", [1, 2])
def test_ranks_that_die_while_they_are_first_placed_are_placed_again(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no journal yet, and nothing to restore; the restarts are counted as all are."""
    monkeypatch.setattr(rank_group, "TrainerRank", Arriving)
    notices: list[str] = []

    async def main() -> None:
        options = arriving(tmp_path, deaths)
        trainer_backend = RankedTrainer(options, deadline_s=200.0, restarts=1, notice=notices.append)
        try:
            if deaths == 1:
                await trainer_backend.place()
                assert await trainer_backend.base_checksum() == "base"
            else:
                with pytest.raises(TrainerLostError, match="placing the ranks of the trainer failed"):
                    await trainer_backend.place()
            assert trainer_backend.restarts == 1
        finally:
            trainer_backend.close()

    asyncio.run(main())
    (notice,) = notices
    assert notice.startswith("placing the ranks of the trainer failed, and the trainer with it: rank 0: ActorDiedError")
    assert notice.endswith("; the ranks are restarted (1 of 1 times)")


@pytest.mark.parametrize("reader", ["the driver", "one of two ranks"])
def test_an_object_that_is_lost_while_ranks_are_restored_has_others_restored(
    reader: str, tmp_path: Path, lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "TrainerRank", Arriving)
    monkeypatch.setattr(rank_group, "GRACE_S", 0.1)  # for the rank that reads nothing
    whole = RayWeightsRef.put(FakeTrainer().weights(0))
    needed = [replace(whole, ref=lost), whole]
    notices: list[str] = []

    async def restore(trainer_backend: TrainerBackend, version: int) -> None:
        read = needed.pop(0)
        if reader == "the driver":
            await asyncio.to_thread(read.fetch)
        elif read is not whole:
            await trainer_backend.load(tmp_path / "lost")
        await trainer_backend.load(tmp_path / str(version))

    async def main() -> None:
        options = arriving(tmp_path, count=1 if reader == "the driver" else 2)
        trainer_backend = RankedTrainer(options, deadline_s=200.0, restore=restore, notice=notices.append)
        try:
            await trainer_backend.load(tmp_path / "2")
            os.kill(trainer_backend.processes[0], signal.SIGKILL)
            assert await trainer_backend.base_checksum() == "base"
            assert trainer_backend.restarts == 2
        finally:
            trainer_backend.close()

    asyncio.run(main())
    _, again, done = notices
    assert "version 0 cannot be fetched: " in again
    assert again.endswith("; the ranks are restarted (2 of 4 times)")
    assert done == "the ranks of the trainer are at version 2 again"


@pytest.mark.slow
def test_a_version_is_written_by_its_rank_and_asked_for_again_where_it_is_lost(tmp_path: Path, lost: Any) -> None:
    """Lost alone, lost with the rank that made it, and lost for good."""
    files = VersionFiles(tmp_path / "versions")

    async def restore(trainer_backend: TrainerBackend, version: int) -> None:
        for each in BATCHES[:version]:
            await trainer_backend.update(each)

    async def written(weights: Weights) -> None:
        files.write(weights)
        await files.durable(weights.version)
        assert files.read(weights.version, weights.checksum) is not None

    async def main() -> None:
        trainer_backend = RankedTrainer(RankOptions(Meeting, cpus=0.1), deadline_s=200.0, restore=restore)
        try:
            first: Any = (await trainer_backend.update(BATCHES[0]))[1]
            assert await asyncio.to_thread(first.store, tmp_path / "elsewhere")
            assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["000001.safetensors"]
            first.ref = lost
            await written(first)
            second: Any = (await trainer_backend.update(BATCHES[1]))[1]
            second.ref = lost
            os.kill(trainer_backend.processes[0], signal.SIGKILL)
            await written(second)
            third: Any = (await trainer_backend.update(batch(2, 7)))[1]
            third.ref, third.checksum = lost, "another"  # as if it had been trained again with other bits
            with pytest.raises(RunError, match="version 3 was lost before it was written"):
                await written(third)
        finally:
            trainer_backend.close()
            files.close()

    asyncio.run(main())


@pytest.mark.slow
def test_the_ranks_of_a_recipe_train_and_export_its_policy_as_one_process_does(model: Path, tmp_path: Path) -> None:
    made = recipe(
        model, tmp_path, "runtime.type=ray", "runtime.trainers=2", "runtime.trainer_cpus=0.1", "rollout.staleness=2",
        'algorithm.type="dora"',
    )  # fmt: skip
    draw = np.random.default_rng(0)
    samples = []
    for id in range(6):
        tokens = draw.integers(0, 50, int(draw.integers(2, 12))).astype(np.int32)
        done = Completion(id, 0, tokens, np.full(len(tokens), -3.0, np.float32), "stop", "")
        samples.append(Sample(id, id // 3, 0, (1, 2, 3), done, float(id % 2)))
    alone = make_trainer(made, load_model(str(model), torch.float32, torch.device("cpu")), str(model))
    first = alone.weights(0)
    alone.update(Batch(0, samples))
    report = alone.update(Batch(1, samples, {0: first}))  # scored under the version that sampled
    expected = alone.weights(2)

    async def main() -> tuple[UpdateReport, Weights]:
        source = await asyncio.to_thread(ModelSource.of, str(model))
        store = WeightsStore(lambda weights: first)
        trainer_backend = RankedTrainer(rank_options(made, source), deadline_s=200.0, store=store)
        try:
            sampled_by = await trainer_backend.weights(0)
            assert sampled_by.checksum == first.checksum
            await trainer_backend.update(Batch(0, samples))
            damaged = {name: tensor + 1 for name, tensor in first.tensors.items()}
            sampled_by.ref = ray.put(PackedWeights.pack(replace(first, tensors=damaged)))  # the file is as it was
            told, handle = await trainer_backend.update(Batch(1, samples, {0: sampled_by}))
            assert store.renewed == 1
            await trainer_backend.export(tmp_path / "policy")
            assert isinstance(handle, RayWeightsRef)
            return told, await asyncio.to_thread(handle.fetch)
        finally:
            trainer_backend.close()

    told, weights = asyncio.run(main())
    assert told.metrics["loss"] == pytest.approx(report.metrics["loss"], abs=1e-6)
    assert told.metrics["grad_norm"] == pytest.approx(report.metrics["grad_norm"], rel=1e-4)
    assert (weights.kind, weights.scale) == (expected.kind, expected.scale)
    for name, tensor in expected.tensors.items():
        assert torch.allclose(weights.tensors[name], tensor, rtol=1e-3, atol=2e-6), name
    assert (tmp_path / "policy" / "adapter_config.json").exists()
