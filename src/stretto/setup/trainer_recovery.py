"""Restores a trainer to a version of a run, from a checkpoint and the journal.

The disk always has what a trainer needs: the last checkpoint, and in the journal the batches after it. So the loss of a
trainer costs only the updates after the checkpoint, which are trained again with the recorded members in the recorded
order. A resumed run, a run whose trainer is lost, and `stretto replay` all use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.errors import RunError
from stretto.run.protocols import TrainerBackend
from stretto.store.checkpoint_files import Checkpoint, find_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.resume_point import recorded_checksums
from stretto.store.version_files import VersionFiles
from stretto.types import Batch, Sample, UpdateReport, Weights, WeightsRef, older_versions


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


async def refuse_another_start(trainer: TrainerBackend, journal: Path, started_from: str) -> None:
    """Raises `RunError` if the adapter or the warm start that a run began with has changed.

    The trainer is at version 0. `started_from` begins the error: "`model.adapter = 'x'` is not the adapter".

    Without a checkpoint version 0 is compared anyhow. With one, only the reference of a divergence would differ.
    """
    with JournalReader(journal) as reader:
        recorded = reader.versions().get(0)
    first = await trainer.weights(0)
    if recorded is not None and first.checksum != recorded:
        raise RunError(
            f"{started_from} that the run began with: version 0 was recorded as "
            f"{recorded}, and is {first.checksum}; give it as it was, or start a new run"
        )


class SampledVersions:
    """The weights of the last versions, for an objective that scores tokens under the version that sampled them.

    An update needs versions up to `ages` older than its own. With `ages` 0 nothing is kept.
    """

    def __init__(self, ages: int, versions: Mapping[int, Weights | WeightsRef] | None = None) -> None:
        self._ages = ages
        self._versions = dict(versions or {})

    async def add(self, weights: Weights | WeightsRef) -> None:
        """Keeps a version that was just made, in place of an earlier one of the same number."""
        if not self._ages:
            return
        if isinstance(weights, Weights) and weights.kind == "full":
            weights = await asyncio.to_thread(weights.on_host)
        self._versions[weights.version] = weights
        for version in [each for each in self._versions if each < weights.version - self._ages]:
            del self._versions[version]

    def batch(self, update: int, samples: Sequence[Sample]) -> Batch:
        """Returns the batch of an update with the versions that sampled it."""
        older = older_versions(samples, update) if self._ages else []
        return Batch(update, samples, {each: self._versions[each] for each in older if each in self._versions})


async def train_again(
    trainer: TrainerBackend,
    journal: Path,
    first: int,
    last: int,
    sampled: SampledVersions,
    reported: Callable[[UpdateReport], None] = lambda report: None,
) -> AsyncGenerator[Weights | WeightsRef, None]:
    """Yields the weights of version `first`, where the trainer is, and of each up to `last` as it is trained.

    After each yield the trainer is at the version that was yielded. Weights that it adopts then are what the next
    update trains; the caller adds them to `sampled`. `reported` gets the report of each update before its weights are
    yielded.
    """
    made = await trainer.weights(first)
    await sampled.add(made)
    yield made
    for update in range(first, last):
        samples, how = await asyncio.to_thread(_recorded, journal, update)
        report, made = await trainer.update(replace(sampled.batch(update, samples), **how))
        await sampled.add(made)
        reported(report)
        yield made


def _recorded(journal: Path, update: int) -> tuple[Sequence[Sample], Mapping[str, Any]]:
    """Returns the samples of an update, and the fields of its batch that decide how sums are rounded."""
    with JournalReader(journal) as reader:
        samples, metrics = reader.batch(update), reader.update_metrics(update)
    size = metrics.get("micro_tokens")
    skips = not metrics or "skipped_sequences" in metrics
    lowered = bool(metrics.get("micro_tokens_lowered"))
    return samples, {"micro_tokens": None if size is None else max(1, int(size)), "lowered": lowered, "skips": skips}


async def usable_checkpoint(
    folder: Path,
    most: int,
    version: int,
    *,
    ages: int,
    journal: Path,
    checksums: Mapping[int, str],
    versions: VersionFiles,
    say: Callable[[str], None],
) -> tuple[Checkpoint | None, SampledVersions]:
    """Returns the newest checkpoint after at most `most` updates from which a trainer can be brought to `version`.

    With it come the versions before it that the updates after it were trained with. A checkpoint whose versions are
    lost is passed over: from an older one they are made again.
    """
    while True:
        checkpoint = await newest_checkpoint(folder, most, say)
        if checkpoint is None or not ages:
            return checkpoint, SampledVersions(ages)
        first = checkpoint.updates
        older = await asyncio.to_thread(_sampled_before, journal, first, min(version, first + ages))
        found: dict[int, Weights | WeightsRef] = {}
        for each in older:
            read = await asyncio.to_thread(versions.read, each, checksums[each])
            reference = None if read is None else versions.reference(read)
            if reference is None:
                say(
                    f"checkpoint `{checkpoint.folder}` cannot be used: the updates after it need version {each}, which "
                    "is not in `versions/`; using an older one"
                )
                break
            found[each] = reference
        else:
            return checkpoint, SampledVersions(ages, found)
        most = first - 1


def _sampled_before(journal: Path, first: int, last: int) -> list[int]:
    """Returns the versions before `first` that sampled tokens of the updates from `first` to before `last`."""
    with JournalReader(journal) as reader:
        return sorted({v for update in range(first, last) for v in older_versions(reader.batch(update), first)})


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
    sampled: SampledVersions,
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
    async with aclosing(train_again(trainer, journal, first, version, sampled)) as again:
        async for made in again:
            recorded = checksums.get(made.version, made.checksum)  # the newest version may have none yet
            if made.checksum != recorded:
                made = await _correct(trainer, made, recorded, versions, needed, say)
                await sampled.add(made)
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
    folder: Path, journal: Journal, versions: VersionFiles, say: Callable[[str], None], *, ages: int
) -> Callable[[TrainerBackend, int], Awaitable[None]]:
    """Returns a function that brings a new trainer, at version 0, to a later version of the running run in `folder`.

    Updates that are trained again need versions up to `ages` older than their own.
    """

    async def restore(trainer: TrainerBackend, version: int) -> None:
        await journal.durable()
        checksums = await asyncio.to_thread(recorded_checksums, journal.path)
        checkpoint, sampled = await usable_checkpoint(
            folder, version, version,
            ages=ages, journal=journal.path, checksums=checksums, versions=versions, say=say,
        )  # fmt: skip
        way = bring_back(
            trainer, checkpoint, version,
            journal=journal.path, checksums=checksums, versions=versions, sampled=sampled, needed={version}, say=say,
        )  # fmt: skip
        async for _ in way:
            pass  # the instances have the weights

    return restore
