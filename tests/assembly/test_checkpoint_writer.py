"""Checkpoints that are taken while the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stretto.assembly.checkpoint_writer import take_checkpoint
from stretto.cluster.rank_actor import TrainerRank
from stretto.cluster.rank_group import RankOptions
from stretto.cluster.trainer import RankedTrainer
from stretto.errors import RunError
from stretto.local.trainer import ThreadedTrainer
from stretto.store.checkpoint_files import find_checkpoint
from stretto.store.journal import Journal
from stretto.store.version_files import VersionFiles
from stretto.training.fake import FakeTrainer
from stretto.types import Weights


def a_version(version: int) -> Weights:
    made = FakeTrainer().weights(0)
    return Weights(version, made.kind, made.tensors, made.checksum, made.scale)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("ages", [0, 1])
def test_a_version_that_is_retired_while_a_checkpoint_is_written_is_left_only_if_that_holds_it(
    tmp_path: Path, durable: bool, ages: int
) -> None:
    versions = VersionFiles(tmp_path / "versions", durable=durable)
    needed = {version: a_version(version) for version in (1, 2)}
    controller = SimpleNamespace(newest=2, needed_versions=[1, 2])
    loop = cast(Any, SimpleNamespace(controller=controller, weights=needed, rollouts={}))

    class Slow(ThreadedTrainer):
        async def save(self, folder: Path) -> None:
            await super().save(folder)
            versions.remove(1)  # its last trajectory has ended meanwhile

    async def main() -> None:
        role = Slow(FakeTrainer(), 1, deadline_s=20.0)
        with Journal.open(tmp_path / "journal.sqlite") as journal:
            for weights in needed.values():
                versions.write(weights)
            await take_checkpoint(tmp_path, loop, role, journal, versions, ages=ages)
        role.close()

    asyncio.run(main())
    versions.close()
    assert versions.versions() == ([1, 2] if ages else [2])
    found, problems = find_checkpoint(tmp_path / "checkpoints", 2)
    assert found is not None
    assert (found.updates, problems) == (2, [])


class Ranks:
    """The ranks of a trainer in this process: rank 0 does what it does on a cluster."""

    failure = None
    processes = (1,)

    def __init__(self, trainer: FakeTrainer) -> None:
        self.version = trainer.version
        self._rank = TrainerRank(lambda _: trainer, 0, 1, 1)
        self._rank._trainer = trainer

    async def capture(self) -> int:
        self._rank.capture()
        return self.version

    async def write(self, folder: Path) -> None:
        self._rank.write(str(folder))


def test_a_full_disk_under_a_rank_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    class Fills(FakeTrainer):
        full = False

        def capture(self) -> Callable[[Path], None]:
            write = super().capture()

            def half(folder: Path) -> None:
                write(folder)
                if self.full:
                    (folder / "half").write_text("...")
                    raise OSError(28, "No space left on device")

            return half

    trainer, weights = Fills(), {0: a_version(0)}
    controller = SimpleNamespace(newest=0, needed_versions=[0])
    loop = cast(Any, SimpleNamespace(controller=controller, weights=weights, rollouts={}))
    versions = VersionFiles(tmp_path / "versions", durable=True)
    trainer_backend = RankedTrainer(RankOptions(lambda _: trainer), deadline_s=20.0)
    trainer_backend._group = cast(Any, Ranks(trainer))

    async def main() -> None:
        with Journal.open(tmp_path / "journal.sqlite") as journal:
            versions.write(weights[0])
            await take_checkpoint(tmp_path, loop, trainer_backend, journal, versions, ages=0)
            controller.newest, trainer.full = 1, True
            with pytest.raises(RunError, match=r"the trainer's state cannot be written to .*No space left on device"):
                await take_checkpoint(tmp_path, loop, trainer_backend, journal, versions, ages=0)

    asyncio.run(main())
    versions.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000000"], "nothing half written is left"
    found, problems = find_checkpoint(tmp_path / "checkpoints", 1)
    assert found is not None
    assert (found.updates, problems) == (0, [])
