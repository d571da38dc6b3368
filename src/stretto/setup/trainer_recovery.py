"""Restores a trainer to a version of a run, from a checkpoint and the journal.

The disk always has what a trainer needs: the last checkpoint, and in the journal the batches after it. So the loss of a
trainer costs only the updates after the checkpoint, which are trained again with the recorded members in the recorded
order. A resumed run, a run whose trainer is lost, and `stretto replay` all use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing
from pathlib import Path

from stretto.errors import RunError
from stretto.run.protocols import TrainerBackend
from stretto.store.checkpoint_files import Checkpoint, find_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.resume_point import recorded_checksums
from stretto.store.version_files import VersionFiles
from stretto.types import Batch, UpdateReport, Weights, WeightsRef


async def refuse_another_base(trainer: TrainerBackend, journal: Path) -> None:
    """Raises `RunError` if the adapters of a run were trained over another base than the trainer's.

    The checksums of the adapters do not show that: the same adapters over another base are another policy.
    """
    with JournalReader(journal) as reader:
        recorded = reader.base()
    if recorded is None:
        return
    if (own := await trainer.base_checksum()) != recorded:
        raise RunError(
            f"the model is not the one that the run began with: the base of its adapters has the checksum {own}, and "
            f"{recorded} was recorded; give `model.path` as it was, or start a new run"
        )


async def train_again(
    trainer: TrainerBackend,
    journal: Path,
    first: int,
    last: int,
    reported: Callable[[UpdateReport], None] = lambda report: None,
) -> AsyncGenerator[Weights | WeightsRef, None]:
    """Yields the weights of version `first`, where the trainer is, and of each up to `last` as it is trained.

    After each yield the trainer is at the version that was yielded. Weights that it adopts then are what the next
    update trains. `reported` gets the report of each update before its weights are yielded.
    """
    yield await trainer.weights(first)
    for update in range(first, last):
        report, made = await trainer.update(await asyncio.to_thread(_batch, journal, update))
        reported(report)
        yield made


def _batch(journal: Path, update: int) -> Batch:
    with JournalReader(journal) as reader:
        return Batch(update, reader.batch(update))


async def newest_checkpoint(folder: Path, most: int, say: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint of a run after at most `most` updates. `say` gets what is damaged."""
    checkpoint, problems = await asyncio.to_thread(find_checkpoint, folder / "checkpoints", most)
    for problem in problems:
        say(f"{problem}; using an older one")
    return checkpoint


async def bring_back(
    trainer: TrainerBackend,
    checkpoint: Checkpoint | None,
    version: int,
    *,
    journal: Path,
    checksums: Mapping[int, str],
    versions: VersionFiles,
    needed: Container[int],
    say: Callable[[str], None],
) -> AsyncIterator[Weights | WeightsRef]:
    """Brings a trainer at version 0 to a later one. Yields the weights of the versions on the way that are `needed`.

    Each version must have the recorded checksum. If one has not, the trainer adopts its file. If there is no file, the
    run continues with the weights that were trained again, and `say` gets a sentence if the version is needed. Version
    0 is the model itself, so another checksum of it raises `RunError`.
    """
    first = 0
    if checkpoint is not None:
        first = checkpoint.updates
        await trainer.load(checkpoint.folder / "trainer")
    if first < version:
        say(f"updates {first} to {version - 1} are trained again from the journal, as they were recorded")
    async with aclosing(train_again(trainer, journal, first, version)) as again:
        async for made in again:
            recorded = checksums.get(made.version, made.checksum)  # the newest version may have none yet
            if made.checksum != recorded:
                made = await _correct(trainer, made, recorded, versions, needed, say)
            if made.version in needed:
                yield made


async def _correct(
    trainer: TrainerBackend,
    made: Weights | WeightsRef,
    recorded: str,
    versions: VersionFiles,
    needed: Container[int],
    say: Callable[[str], None],
) -> Weights | WeightsRef:
    """Returns the recorded weights of a version that was trained again with other bits, or the new ones if they are
    lost."""
    version = made.version
    own = await asyncio.to_thread(versions.read, version, recorded)
    if own is not None:
        await trainer.adopt(own)
        say(f"version {version} was trained again with other bits; the recorded weights are taken instead")
        return await trainer.weights(version)
    if version == 0:
        raise RunError(
            f"the model is not the one that the run began with: version 0 was recorded as {recorded}, and is "
            f"{made.checksum}; give `model.path` as it was, or start a new run"
        )
    if version in needed:
        say(f"version {version} was trained again with other bits; nothing has the recorded weights")
    return made


def make_restore(
    folder: Path, journal: Journal, versions: VersionFiles, say: Callable[[str], None]
) -> Callable[[TrainerBackend, int], Awaitable[None]]:
    """Returns a function that brings a new trainer, at version 0, to a later version of the running run in `folder`."""

    async def restore(trainer: TrainerBackend, version: int) -> None:
        await journal.durable()
        checkpoint = await newest_checkpoint(folder, version, say)
        checksums = await asyncio.to_thread(recorded_checksums, journal.path)
        way = bring_back(
            trainer, checkpoint, version,
            journal=journal.path, checksums=checksums, versions=versions, needed={version}, say=say,
        )  # fmt: skip
        async for _ in way:
            pass  # the instances have the weights

    return restore
