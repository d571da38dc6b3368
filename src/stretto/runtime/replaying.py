"""Training again from a journal alone: every version of a run, with the checksum that was recorded of it.

A run's weights follow from the model that it began with and from its batches, in their order; which trajectories were
in a batch depended on the clock, but that is recorded. So a run of any paradigm can be trained again, by the same
trainer, without generating anything; on the processor and with the threads that it had, to the same bits. Several ranks
sum in another order than the one that trains here, so of their versions only the first can agree.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from stretto.config import load_recipe
from stretto.errors import RunError
from stretto.models import load_model
from stretto.observe.progress import Silent
from stretto.runtime.device import choose_device, choose_dtype
from stretto.runtime.export import export_policy
from stretto.runtime.parts import make_trainer, model_path_of, rank_threads, role_threads
from stretto.runtime.roles import TrainerRole, TrainerSeat
from stretto.runtime.starting import refuse_unwritable
from stretto.runtime.trainer_recovery import refuse_another_base, train_again
from stretto.store.reader import JournalReader
from stretto.store.recovery import recorded_checksums
from stretto.store.schema import journal_path


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    updates: int  # that were trained again
    difference: str | None  # the first, in words; None: every version has the checksum that was recorded

    def __str__(self) -> str:
        if self.difference is not None:
            return self.difference
        return f"all {self.updates + 1} versions of {self.updates} updates agree with what was recorded"


def replay(
    folder: Path,
    *,
    until: int | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Replayed:
    """Train a run again up to version `until` (default: its last), or to the first that differs.

    `out` is a folder that gets the policy it ended with, as `train` leaves it in `policy/`.
    Raises `RunError` where there is nothing to train again.
    """
    journal = journal_path(folder)
    if not (folder / "config.toml").is_file():
        raise RunError(f"`{folder}` is no run folder: it has no `config.toml`")
    if out is not None:
        if out.exists():
            raise RunError(f"`{out}` exists already; choose another `--out`")
        refuse_unwritable(out)
    checksums = recorded_checksums(journal)
    if not checksums:
        raise RunError(f"the run in `{folder}` ended before it had a version; there is nothing to train again")
    last = max(checksums) if until is None else until
    if not 0 <= last <= max(checksums):
        raise RunError(f"`--until` is {last}; the run has versions 0 to {max(checksums)}")
    recipe = load_recipe(folder / "config.toml")
    transformers_logging.disable_progress_bar()
    cluster = recipe.runtime.type == "ray"
    threads = rank_threads(recipe) if cluster else role_threads(recipe)[1]  # sums depend on how they are cut
    ranks = recipe.runtime.trainers if cluster else 1
    if ranks > 1:
        say(
            f"the run was trained by {ranks} ranks (`runtime.trainers`), whose sums are rounded otherwise than of "
            "one: versions after the first will differ in their last bits, and that is no fault"
        )
    torch.set_num_threads(threads)
    path, device = model_path_of(recipe, Silent()), choose_device(recipe.runtime.device)
    model = load_model(path, choose_dtype(recipe.model.dtype, device), device)
    trainer = TrainerRole(make_trainer(recipe, model, path), threads, deadline_s=math.inf)
    try:
        done = asyncio.run(_replay(trainer, journal, last, checksums, say))
        if out is not None:
            with JournalReader(journal) as reader:
                templated = reader.facts().templated
            asyncio.run(export_policy(trainer, out, recipe, templated=templated))
        return done
    finally:
        trainer.close()


async def _replay(
    trainer: TrainerSeat,
    journal: Path,
    last: int,
    checksums: Mapping[int, str],
    say: Callable[[str], None],
) -> Replayed:
    await refuse_another_base(trainer, journal)
    difference, version = None, 0
    async with aclosing(train_again(trainer, journal, 0, last)) as again:
        async for made in again:
            version, recorded = made.version, checksums[made.version]
            if made.checksum != recorded:
                difference = f"version {version} differs: recorded {recorded}, trained again {made.checksum}"
                break
            say(f"version {version} agrees: {recorded}")
    return Replayed(version, difference)
