"""Bringing a trainer to a version of a run by training again from its journal.

What a trainer needs is on the disk at every moment: the last checkpoint, and the batches since then in the journal. So
one that is lost costs the updates after the checkpoint, which are trained again with the members that were recorded, in
their order, and nothing else. A run that is taken up, one whose trainer is lost on the way and one that is replayed all
do that here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing
from pathlib import Path

from stretto.errors import RunError
from stretto.runtime.roles import TrainerSeat
from stretto.store.checkpoint import Checkpoint, find_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.recovery import recorded_checksums
from stretto.store.versions import VersionFiles
from stretto.types import Batch, Weights


async def refuse_another_base(trainer: TrainerSeat, journal: Path) -> None:
    """Raise `RunError` where the adapters of a run were trained over another base than the trainer has.

    Their own checksums say nothing of it: over another base the same adapters are another policy.
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


async def train_again(trainer: TrainerSeat, journal: Path, first: int, last: int) -> AsyncGenerator[Weights, None]:
    """The weights of version `first`, where the trainer is, and of each up to `last` as it is trained again.

    Between two of them the trainer is at the one that came last: what is adopted then is what the next follows.
    """
    yield await trainer.weights(first)
    for update in range(first, last):
        _, made = await trainer.update(await asyncio.to_thread(_batch, journal, update))
        yield made


def _batch(journal: Path, update: int) -> Batch:
    with JournalReader(journal) as reader:
        return Batch(update, reader.batch(update))


async def newest_checkpoint(folder: Path, most: int, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of a run after at most so many updates."""
    checkpoint, problems = await asyncio.to_thread(find_checkpoint, folder / "checkpoints", most)
    for problem in problems:
        say(f"{problem}; going on from an older one")
    return checkpoint


async def bring_back(
    trainer: TrainerSeat,
    checkpoint: Checkpoint | None,
    version: int,
    *,
    journal: Path,
    checksums: Mapping[int, str],
    versions: VersionFiles,
    needed: Container[int],
    say: Callable[[str], None],
) -> AsyncIterator[Weights]:
    """Bring a trainer at version 0 to a later one; the weights of the versions on the way that are `needed`.

    Each must come to the checksum that was recorded. Where one does not, its file is adopted; where there is none, the
    run says so of one that is needed, and goes on with what was trained again. Version 0 is what the model is, so
    another one is a `RunError`.
    """
    first = 0
    if checkpoint is not None:
        first = checkpoint.updates
        await trainer.load(checkpoint.folder / "trainer")
    if first < version:
        say(f"updates {first} to {version - 1} are trained again from the journal, as they were recorded")
    async with aclosing(train_again(trainer, journal, first, version)) as again:
        async for made in again:
            recorded = checksums.get(made.version, made.checksum)  # none yet of what is only just made
            if made.checksum != recorded:
                made = await _correct(trainer, made, recorded, versions, needed, say)
            if made.version in needed:
                yield made


async def _correct(
    trainer: TrainerSeat,
    made: Weights,
    recorded: str,
    versions: VersionFiles,
    needed: Container[int],
    say: Callable[[str], None],
) -> Weights:
    """The recorded weights of a version that came to other bits, or those if nothing has them."""
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


def restoring(
    folder: Path, journal: Journal, versions: VersionFiles, say: Callable[[str], None]
) -> Callable[[TrainerSeat, int], Awaitable[None]]:
    """What brings a trainer that was just made, at version 0, to a later one while the run in `folder` goes on."""

    async def restore(trainer: TrainerSeat, version: int) -> None:
        await journal.durable()
        checkpoint = await newest_checkpoint(folder, version, say)
        checksums = await asyncio.to_thread(recorded_checksums, journal.path)
        way = bring_back(
            trainer, checkpoint, version,
            journal=journal.path, checksums=checksums, versions=versions, needed={version}, say=say,
        )  # fmt: skip
        async for _ in way:
            pass  # rollout has its weights

    return restore
