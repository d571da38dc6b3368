"""Bringing a trainer that was just made to a version of the run that is under way.

What the trainer needs is on the disk at every moment: the last checkpoint, and the batches since then in the journal.
So a trainer that is lost costs the updates after the checkpoint, which are trained again, and nothing else: rollout
goes on meanwhile, and what it is given is the version that it has already seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from stretto.runtime.roles import TrainerSeat
from stretto.store.checkpoint import find_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.versions import VersionFiles
from stretto.types import Batch


def restoring(
    folder: Path, journal: Journal, versions: VersionFiles, say: Callable[[str], None]
) -> Callable[[TrainerSeat, int], Awaitable[None]]:
    """What brings a trainer of the run in `folder`, at version 0, to a later one.

    Each version on the way must come to the checksum that was recorded. Where one does not, its file is adopted; where
    there is none, the run says so, and goes on with what was trained again.
    """

    async def restore(trainer: TrainerSeat, version: int) -> None:
        await journal.durable()
        checkpoint, problems = await asyncio.to_thread(find_checkpoint, folder / "checkpoints", version)
        for problem in problems:
            say(f"{problem}; going on from an older one")
        first = 0 if checkpoint is None else checkpoint.updates
        if checkpoint is not None:
            await trainer.load(checkpoint.folder / "trainer")
        if first < version:
            say(f"updates {first} to {version - 1} are trained again from the journal, as they were recorded")
        for update in range(first, version):
            batch, recorded = await asyncio.to_thread(_recorded, journal.path, update)
            _, made = await trainer.update(batch)
            if recorded in (None, made.checksum):
                continue
            own = await asyncio.to_thread(versions.read, update + 1, recorded)
            if own is not None:
                await trainer.adopt(own)
            taken = "the recorded weights are taken instead" if own else "nothing has the recorded weights"
            say(f"version {update + 1} was trained again with other bits; {taken}")

    return restore


def _recorded(path: Path, update: int) -> tuple[Batch, str | None]:
    """The batch of an update, and the checksum of the version that it made."""
    with JournalReader(path) as reader:
        return Batch(update, reader.batch(update)), reader.versions().get(update + 1)
