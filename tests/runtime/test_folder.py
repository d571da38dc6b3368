"""Checkpoints that are taken while the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stretto.runtime.folder import take_checkpoint
from stretto.runtime.roles import TrainerRole
from stretto.store.checkpoint import find_checkpoint
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.training.fake import FakeTrainer
from stretto.types import Weights


def a_version(version: int) -> Weights:
    made = FakeTrainer().weights(0)
    return Weights(version, made.kind, made.tensors, made.checksum, made.scale)


@pytest.mark.parametrize("durable", [True, False])
def test_a_version_that_is_retired_while_a_checkpoint_is_written_leaves_no_file(tmp_path: Path, durable: bool) -> None:
    versions = VersionFiles(tmp_path / "versions", durable=durable)
    needed = {version: a_version(version) for version in (1, 2)}
    brain = SimpleNamespace(newest=2, needed_versions=[1, 2])
    loop = cast(Any, SimpleNamespace(brain=brain, weights=needed, flights={}))

    class Slow(TrainerRole):
        async def save(self, folder: Path) -> None:
            await super().save(folder)
            versions.remove(1)  # its last trajectory has ended meanwhile

    async def main() -> None:
        role = Slow(FakeTrainer(), 1, deadline_s=20.0)
        with Journal.open(tmp_path / "journal.sqlite") as journal:
            for weights in needed.values():
                versions.write(weights)
            await take_checkpoint(tmp_path, loop, role, journal, versions)
        role.close()

    asyncio.run(main())
    versions.close()
    assert versions.versions() == [2]
    found, problems = find_checkpoint(tmp_path / "checkpoints", 2)
    assert found is not None
    assert (found.updates, problems) == (2, [])
