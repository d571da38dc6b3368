"""Makes the run folder, and writes checkpoints into it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stretto import clock
from stretto.errors import RunError, StalledError
from stretto.recipe.schema import Recipe
from stretto.run.folder_checks import refuse_occupied, standing
from stretto.run.loop import Loop
from stretto.run.protocols import TrainerBackend
from stretto.store.checkpoint_files import (
    abandon_checkpoint,
    begin_checkpoint,
    complete_checkpoint,
    complete_checkpoints,
)
from stretto.store.journal import Journal
from stretto.store.lock import Lock
from stretto.store.schema import JOURNAL_NAME
from stretto.store.version_files import VersionFiles

log = logging.getLogger(__name__)

COMPLETE_S = 300.0  # for the last files of a checkpoint, and its renaming
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # one, so that checkpoints are completed in order


@contextlib.contextmanager
def claimed_folder(folder: Path) -> Iterator[Lock]:
    """Claims a folder for a new run before anything is built, by a lock in it. Removes both if no run begins.

    Raises `RunError` if the folder is taken, or another process starts a run in it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / JOURNAL_NAME)
    except OSError as error:
        raise RunError(f"run folder `{folder}` cannot be made: {error}") from error
    try:
        refuse_occupied(folder, claimed=True)
        yield lock
    finally:
        with contextlib.suppress(OSError):  # nothing more is lost than an empty folder
            if standing(folder) == "empty":
                lock.remove()
                for each in made:
                    each.rmdir()
        lock.close()


def begin_folder(recipe: Recipe, folder: Path) -> None:
    """Writes the recipe into a folder that this process has claimed. From then on there is a run in it.

    If it is there already, nothing is written.
    """
    try:
        scratch, final = folder / "config.partial", folder / "config.toml"
        if final.is_file() and final.read_text(encoding="utf-8") == recipe.dumps():
            return
        scratch.write_text(recipe.dumps(), encoding="utf-8")
        scratch.replace(final)
    except OSError as error:
        raise RunError(f"run folder `{folder}` cannot be made: {error}") from error


def take_checkpoint(
    folder: Path,
    loop: Loop,
    trainer: TrainerBackend,
    journal: Journal,
    versions: VersionFiles,
    *,
    ages: int,
    keeps_routing: bool = True,
) -> Coroutine[Any, Any, None]:
    """Captures the state of the run now. Returns a coroutine that writes it, after the journal is durable.

    The updates after it, if they are trained again, need versions up to `ages` older than their own: those before the
    checkpoint are held with it. Unless it `keeps_routing`, records of routing that no update
    after the oldest checkpoint trains on are deleted.

    The coroutine asks the trainer for its state before it waits for anything else, so that state is of the same
    version. It raises `RunError` if the checkpoint cannot be written; the one before it is still there then.
    """
    updates, root = loop.controller.newest, folder / "checkpoints"
    older = [version for version in loop.weights if updates - ages <= version < updates]
    needed = [loop.weights[version] for version in {*loop.controller.needed_versions, *older}]
    versions.hold(updates, older)
    suspended = [rollout.suspended for rollout in loop.rollouts.values() if rollout.suspended is not None]
    turns = {
        rollout.id: rollout.turns.lineages()
        for rollout in loop.rollouts.values()
        if not rollout.is_generated and rollout.turns.done
    }
    for weights in needed:
        versions.keep(weights)  # now: a version that is retired meanwhile must not be written after its removal

    async def save() -> None:
        try:
            await write()
        finally:
            versions.keep_holds({int(each.name) for each in complete_checkpoints(root)})
        if not keeps_routing:
            forget_routing(journal, root)

    async def write() -> None:
        began, scratch = clock.now(), begin_checkpoint(root, updates)
        try:
            await trainer.save(scratch / "trainer")
            for weights in needed:
                if versions.keeps(weights.version):
                    await _durable(versions, weights.version)
            await journal.durable()
        except (OSError, SafetensorError) as error:
            abandon_checkpoint(scratch)
            raise RunError(f"the trainer of version {updates} could not be saved to `{root}`: {error}") from error
        except BaseException:
            abandon_checkpoint(scratch)
            raise
        completing = asyncio.get_running_loop().run_in_executor(_WRITER, complete_checkpoint, scratch, suspended, turns)
        try:
            await asyncio.wait_for(asyncio.shield(completing), COMPLETE_S)
        except TimeoutError:
            raise RunError(f"checkpoint `{scratch}` is not complete after {COMPLETE_S:g} s: the disk hangs") from None
        log.info(
            "checkpoint of version %d: written in %.2f s, with %d versions and the tokens of %d trajectories",
            updates, clock.now() - began, len(needed), len(suspended),
        )  # fmt: skip

    return save()


def forget_routing(journal: Journal, root: Path) -> None:
    """Deletes the records of routing that are not needed to train on from any checkpoint in `root`."""
    if versions := [int(each.name) for each in complete_checkpoints(root)]:
        journal.routing_forgotten(min(versions))


async def _durable(versions: VersionFiles, version: int) -> None:
    try:
        await versions.durable(version)
    except StalledError as error:  # a checkpoint that cannot be written does not end the run
        raise RunError(str(error)) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that a reader never sees a part of it."""
    scratch = path.with_suffix(".partial")
    try:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise RunError(f"`{path}` cannot be written: {error}") from error
