"""A trainer that was lost comes back to its version from the run's folder alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_cases import Bench, plan

from stretto.local.trainer import ThreadedTrainer
from stretto.setup.trainer_recovery import make_restore
from stretto.store.checkpoint_files import begin_checkpoint, complete_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.version_files import VersionFiles
from stretto.training.fake import FakeTrainer
from stretto.types import Batch, UpdateReport


class Rounding(FakeTrainer):
    """Comes to other bits than the trainer that it follows, at one update."""

    def update(self, batch: Batch) -> UpdateReport:
        report = super().update(batch)
        if batch.update == 3:
            self._values = self._values + 1
        return report


def recovered(folder: Path, trainer: FakeTrainer, version: int) -> tuple[str, list[str]]:
    said: list[str] = []

    async def main() -> str:
        role, versions = ThreadedTrainer(trainer, 1, deadline_s=20.0), VersionFiles(folder / "versions")
        try:
            with Journal.open(folder / "journal.sqlite", resume=True) as journal:
                await make_restore(folder, journal, versions, said.append, ages=0)(role, version)
            return (await role.weights(version)).checksum
        finally:
            role.close()
            versions.close()

    return asyncio.run(main()), said


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six updates, without a checkpoint."""
    assert Bench(tmp_path, plan()).run()
    return tmp_path


def checksums(folder: Path) -> dict[int, str]:
    with JournalReader(folder / "journal.sqlite") as reader:
        return reader.versions()


def test_without_a_checkpoint_every_update_is_trained_again(run: Path) -> None:
    checksum, said = recovered(run, FakeTrainer(), 5)
    assert checksum == checksums(run)[5]
    assert said == ["updates 0 to 4 are trained again from the journal, as they were recorded"]


def test_only_what_came_after_the_checkpoint_is_trained_again(run: Path) -> None:
    trainer = FakeTrainer()
    with JournalReader(run / "journal.sqlite") as reader:
        for update in range(3):
            trainer.update(Batch(update, reader.batch(update)))
    scratch = begin_checkpoint(run / "checkpoints", 3)
    trainer.save(scratch / "trainer")
    complete_checkpoint(scratch, [])
    fresh = FakeTrainer()
    checksum, said = recovered(run, fresh, 5)
    assert checksum == checksums(run)[5]
    assert [batch.update for batch in fresh.batches] == [3, 4]
    assert said == ["updates 3 to 4 are trained again from the journal, as they were recorded"]


def test_other_bits_are_replaced_by_the_weights_of_the_file(run: Path) -> None:
    versions = VersionFiles(run / "versions")
    follower = FakeTrainer()
    with JournalReader(run / "journal.sqlite") as reader:
        for update in range(4):
            follower.update(Batch(update, reader.batch(update)))
    versions.keep(follower.weights(4))
    versions.close()
    checksum, said = recovered(run, Rounding(), 5)
    assert checksum == checksums(run)[5]
    assert said[-1] == "version 4 was trained again with other bits; the recorded weights are taken instead"


def test_where_nothing_has_the_recorded_weights_the_run_says_so(run: Path) -> None:
    checksum, said = recovered(run, Rounding(), 4)
    assert checksum != checksums(run)[4]
    assert said[-1] == "version 4 was trained again with other bits; nothing has the recorded weights"
