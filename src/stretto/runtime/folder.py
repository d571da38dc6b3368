"""The folder of a run: what is read from it to resume, and what is left in it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stretto.config import Recipe
from stretto.environments.data import PromptStream
from stretto.errors import RunError
from stretto.flights import Flight
from stretto.loop import Loop
from stretto.observe.metrics import Totals
from stretto.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.schema import UNDER_WAY
from stretto.training.trainer import LocalTrainer


def find_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """What a resumed run begins with. Only reads, so that a refusal changes nothing."""
    if not (folder / "config.toml").exists():
        raise RunError(f"`{folder}` holds no run, so there is nothing to resume; leave `--resume` out to start one")
    _refuse_another_recipe(recipe, folder)
    with JournalReader(folder) as reader:
        if any(session.outcome == "finished" for session in reader.sessions()):
            raise RunError(f"the run in `{folder}` is finished, so there is nothing to resume; see `stretto show`")
    return load_checkpoint(folder / "checkpoints")


def make_folder(recipe: Recipe, folder: Path) -> None:
    """A run folder with the recipe in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(recipe.dumps(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"run folder `{folder}` cannot be made: {error}") from error


def _refuse_another_recipe(recipe: Recipe, folder: Path) -> None:
    """A run goes on as it began; only how it is run (its threads and deadlines) may change."""
    before = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    now = tomllib.loads(recipe.dumps())
    for section in sorted((before.keys() | now.keys()) - {"runtime"}):
        if before.get(section) != now.get(section):
            name = f"[{section}]" if isinstance(now.get(section), dict) else section
            raise RunError(
                f"`{name}` differs from the recipe that `{folder}` was started with "
                f"(`{folder / 'config.toml'}`); resume with that one, or start a new run"
            )


def take_checkpoint(
    folder: Path, loop: Loop, totals: Totals, trainer: LocalTrainer, journal: Journal
) -> Callable[[], None]:
    """Take what the run is now; what is returned writes it, once the journal has all that it speaks of."""
    brain = loop.brain
    updates, snapshot, needed = brain.newest, brain.snapshot(), brain.needed_versions
    weights = {version: weights for version, weights in loop.weights.items() if version in needed}
    suspended = [flight.suspended for flight in loop.flights.values() if flight.suspended is not None]

    def write() -> None:
        journal.flush()
        save_checkpoint(
            folder / "checkpoints",
            updates=updates,
            snapshot=snapshot,
            totals=asdict(totals),
            weights=weights,
            suspended=suspended,
            save_trainer=trainer.save,
        )

    return write


def flights_again(prompts: PromptStream, journal: Journal, checkpoint: Checkpoint) -> dict[int, Flight]:
    """The trajectories that were under way: tokens so far from the checkpoint, finished ones from the journal."""
    flights: dict[int, Flight] = {}
    with JournalReader(journal.path) as reader:
        for group in reader.outstanding():
            prompt = prompts.prompt(group.group)
            for record in group.trajectories:
                if record.state not in UNDER_WAY:
                    continue
                flight = Flight(record.trajectory, group.group, group.version, record.seed, prompt)
                if record.state in ("scoring", "scored"):
                    flight.completion, flight.reward = reader.load_completion(record.trajectory)
                flight.suspended = checkpoint.suspended.get(record.trajectory)
                flights[record.trajectory] = flight
    return flights


def export_policy(trainer: LocalTrainer, folder: Path) -> None:
    """Write what was trained, in a form that others load."""
    try:
        trainer.export(folder)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the trained policy cannot be written to `{folder}`: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is whole at every moment."""
    scratch = path.with_suffix(".partial")
    try:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise RunError(f"`{path}` cannot be written: {error}") from error
