"""The folder of a run: what is read from it to resume, and what is left in it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.config import Recipe
from stretto.core.replay import Replay
from stretto.environments.data import PromptStream
from stretto.errors import RunError
from stretto.flights import Flight
from stretto.loop import Loop
from stretto.observe.metrics import Totals
from stretto.runtime.roles import TrainerSeat
from stretto.runtime.starting import refuse_another_recipe, refuse_nothing_to_resume
from stretto.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.schema import UNDER_WAY

_WRITER = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # one, so that checkpoints are complete in their order


def find_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """What a resumed run begins with. Only reads, so that a refusal changes nothing."""
    refuse_nothing_to_resume(folder)
    refuse_another_recipe(recipe, folder)
    return load_checkpoint(folder / "checkpoints")


def make_folder(recipe: Recipe, folder: Path) -> None:
    """A run folder with the recipe in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(recipe.dumps(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"run folder `{folder}` cannot be made: {error}") from error


def take_checkpoint(
    folder: Path, loop: Loop, totals: Totals, trainer: TrainerSeat, journal: Journal
) -> Coroutine[Any, Any, None]:
    """Take what the run is now; what is returned writes it, once the journal has all that it speaks of.

    The trainer is asked for its state before anything else is waited for, so it is that of the same version.
    """
    brain, root = loop.brain, folder / "checkpoints"
    updates, snapshot, needed = brain.newest, brain.snapshot(), brain.needed_versions
    prompts = loop.prompts.state()
    weights = {version: weights for version, weights in loop.weights.items() if version in needed}
    suspended = [flight.suspended for flight in loop.flights.values() if flight.suspended is not None]
    saved = root / f".{updates:06d}.trainer"

    def bring(place: Path) -> None:
        saved.rename(place)

    def write() -> None:
        journal.flush()
        save_checkpoint(
            root,
            updates=updates,
            snapshot=snapshot,
            totals=asdict(totals),
            prompts=prompts,
            weights=weights,
            suspended=suspended,
            save_trainer=bring,
        )
        for left in root.glob(".*.trainer"):  # of a process that was killed
            if left.name < saved.name:
                shutil.rmtree(left, ignore_errors=True)

    async def save() -> None:
        try:
            await trainer.save(saved)
            await asyncio.get_running_loop().run_in_executor(_WRITER, write)
        except OSError as error:
            raise RunError(f"the trainer could not be saved to `{saved}`: {error}") from error
        finally:
            shutil.rmtree(saved, ignore_errors=True)  # nothing is there unless it failed

    return save()


def flights_again(prompts: PromptStream, journal: Journal, checkpoint: Checkpoint) -> dict[int, Flight]:
    """The trajectories that were under way: tokens so far from the checkpoint, finished ones from the journal."""
    flights: dict[int, Flight] = {}
    with JournalReader(journal.path) as reader:
        for group in reader.outstanding():
            prompt = prompts.prompt(group.group, group.row_number)
            for record in group.trajectories:
                if record.state not in UNDER_WAY:
                    continue
                flight = Flight(record.trajectory, group.group, group.version, record.seed, prompt, group.row_number)
                if record.state in ("scoring", "scored"):
                    flight.completion, flight.reward = reader.load_completion(record.trajectory)
                flight.suspended = checkpoint.suspended.get(record.trajectory)
                flights[record.trajectory] = flight
    return flights


def kept_again(prompts: PromptStream, journal: Journal, replay: Replay) -> dict[int, Flight]:
    """The trained trajectories that may be used again, with their tokens and rewards from the journal."""
    kept: dict[int, Flight] = {}
    with JournalReader(journal.path) as reader:
        for group in reader.groups(replay.kept):
            prompt = prompts.prompt(group.group, group.row_number)
            for record in group.trajectories:
                if record.trajectory in replay.kept[group.group].trajectories:
                    completion, reward = reader.load_completion(record.trajectory)
                    kept[record.trajectory] = Flight(
                        record.trajectory, group.group, group.version, record.seed, prompt, group.row_number,
                        completion=completion, reward=reward,
                    )  # fmt: skip
    return kept


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is whole at every moment."""
    scratch = path.with_suffix(".partial")
    try:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise RunError(f"`{path}` cannot be written: {error}") from error
