"""The folder of a run: how it is made, and the checkpoints that are left in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stretto.config import Recipe
from stretto.errors import RunError, StalledError
from stretto.loop import Loop
from stretto.runtime.roles import TrainerSeat
from stretto.runtime.starting import refuse_occupied
from stretto.store.checkpoint import abandon_checkpoint, begin_checkpoint, complete_checkpoint
from stretto.store.journal import Journal
from stretto.store.lock import Lock
from stretto.store.schema import JOURNAL_NAME
from stretto.store.versions import VersionFiles

COMPLETE_S = 300.0  # for the last files of a checkpoint and its name
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # one, so that checkpoints are complete in their order


def make_folder(recipe: Recipe, folder: Path) -> Lock:
    """A run folder with the recipe in it, which is whole or not there; the lock that it is this process's by.

    Raises `RunError` where another process has begun a run in it since it was looked at.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / JOURNAL_NAME)
        try:
            refuse_occupied(folder)
            scratch = folder / "config.partial"
            scratch.write_text(recipe.dumps(), encoding="utf-8")
            scratch.replace(folder / "config.toml")
        except BaseException:
            lock.close()
            raise
        return lock
    except OSError as error:
        raise RunError(f"run folder `{folder}` cannot be made: {error}") from error


def take_checkpoint(
    folder: Path, loop: Loop, trainer: TrainerSeat, journal: Journal, versions: VersionFiles
) -> Coroutine[Any, Any, None]:
    """Take what the run is now; what is returned writes it, once the journal has all that it speaks of.

    The trainer is asked for its state before anything else is waited for, so it is that of the same version. Raises
    `RunError` where it cannot be written: then the checkpoint before it is still there.
    """
    updates, root = loop.brain.newest, folder / "checkpoints"
    needed = [loop.weights[version] for version in loop.brain.needed_versions]
    suspended = [flight.suspended for flight in loop.flights.values() if flight.suspended is not None]
    turns = [
        flight.turns.whole() for flight in loop.flights.values() if flight.completion is None and flight.turns.done
    ]
    for weights in needed:
        versions.keep(weights)  # now, as one that is retired meanwhile must not be written after it was removed

    async def save() -> None:
        scratch = begin_checkpoint(root, updates)
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

    return save()


async def _durable(versions: VersionFiles, version: int) -> None:
    try:
        await versions.durable(version)
    except StalledError as error:  # it ends no run that what a checkpoint needs cannot be written
        raise RunError(str(error)) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is whole at every moment."""
    scratch = path.with_suffix(".partial")
    try:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise RunError(f"`{path}` cannot be written: {error}") from error
