"""Trains a run again from its journal, and compares every version with the recorded checksum (`stretto replay`).

The advantages of every update are compared too, by their digest.

The weights of a run follow from its first model and from its batches in their order. Which trajectories were in a batch
depended on timing, but that is recorded. So a run of any paradigm can be trained again without generating anything; on
the CPU and with the same number of threads, to the same bits. Several ranks sum in another order than the one trainer
here, so only their first version can agree.
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

from stretto.assembly.data_record import recorded_template
from stretto.assembly.export import export_policy
from stretto.errors import RunError
from stretto.local.trainer import ThreadedTrainer
from stretto.models.loading import load_model
from stretto.observe.progress import Silent
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.run.folder_checks import OUT, refuse_unwritable
from stretto.run.phases import Phases
from stretto.run.protocols import TrainerBackend
from stretto.setup.base_models import model_path_of
from stretto.setup.device import choose_device, choose_dtype, prepare_device
from stretto.setup.factories import make_trainer
from stretto.setup.threads import rank_threads, thread_counts
from stretto.setup.trainer_recovery import SampledVersions, refuse_another_base, train_again
from stretto.store.reader import JournalReader
from stretto.store.resume_point import recorded_checksums
from stretto.store.schema import journal_path
from stretto.store.traces import refuse_damaged
from stretto.training.learning_rates import LearningRates
from stretto.types import UpdateReport


@dataclass(frozen=True, slots=True)
class RetrainResult:
    """The number of updates that were trained again, and the first difference."""

    updates: int
    difference: str | None  # a sentence on the first version that differs; None: all have the recorded checksum

    def __str__(self) -> str:
        if self.difference is not None:
            return self.difference
        return f"all {self.updates + 1} versions of {self.updates} updates agree with what was recorded"


def retrain(
    folder: Path,
    *,
    until: int | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RetrainResult:
    """Trains a run again up to version `until` (default: its last), or to the first version that differs.

    `out` is a folder for the resulting policy, as `train` writes it into `policy/`. Raises `RunError` if there is
    nothing to train again.
    """
    journal = journal_path(folder)
    if out is not None:
        if out.exists():
            raise RunError(f"`{out}` exists already; choose another {OUT}")
        refuse_unwritable(out)
    refuse_damaged(folder)
    checksums = recorded_checksums(journal)  # before the recipe: an unreadable journal is the first thing to say
    recipe = recorded_recipe(folder)
    if not checksums:
        raise RunError(f"the run in `{folder}` ended before it had a version; there is nothing to train again")
    last = max(checksums) if until is None else until
    if not 0 <= last <= max(checksums):
        raise RunError(f"`--until` is {last}; the run has versions 0 to {max(checksums)}")
    phases = Phases.recorded(journal) or Phases.only(recipe)
    trainer = made_trainer(recipe, say, phases.learning_rates)
    try:
        sampled = SampledVersions(phases.retrained_ages)
        done = asyncio.run(_retrain(trainer, journal, last, checksums, sampled, say))
        if out is not None:
            with JournalReader(journal) as reader:
                templated = reader.facts().templated
            template = recorded_template(journal)
            asyncio.run(export_policy(trainer, out, recipe, templated=templated, chat_template=template))
        return done
    finally:
        trainer.close()


def recorded_recipe(folder: Path) -> Recipe:
    """Reads the recipe of a run's last phase, as it was resolved. Raises `RunError` if `folder` is no run folder."""
    if not (folder / "config.toml").is_file():
        raise RunError(f"`{folder}` is no run folder: it has no `config.toml`")
    return load_recipe(folder / "config.toml")


def made_trainer(recipe: Recipe, say: Callable[[str], None], rates: LearningRates | None = None) -> ThreadedTrainer:
    """Makes the trainer of a run as it was at version 0. `rates` None: the learning rates are those of the recipe."""
    transformers_logging.disable_progress_bar()
    cluster = recipe.runtime.type == "ray"
    threads = (
        rank_threads(recipe) if cluster else thread_counts(recipe).trainer
    )  # the number of threads decides how sums are rounded
    ranks = recipe.runtime.trainers if cluster else 1
    if ranks > 1:
        say(
            f"the run was trained by {ranks} ranks (`runtime.trainers`), whose sums are rounded in another way than "
            "those of one rank: versions after the first will differ in their last bits, which is expected"
        )
    torch.set_num_threads(threads)
    path, device = model_path_of(recipe, Silent()), choose_device(recipe.runtime.device)
    prepare_device(recipe, device)
    model = load_model(path, choose_dtype(recipe.model.dtype, device), device)
    return ThreadedTrainer(make_trainer(recipe, model, path, rates=rates), threads, deadline_s=math.inf)


async def _retrain(
    trainer: TrainerBackend,
    journal: Path,
    last: int,
    checksums: Mapping[int, str],
    sampled: SampledVersions,
    say: Callable[[str], None],
) -> RetrainResult:
    await refuse_another_base(trainer, journal)
    with JournalReader(journal) as reader:
        advantages = reader.advantages()
    difference, version, others = None, 0, list[int]()  # `others`: updates with other advantages than recorded

    def compare(report: UpdateReport) -> None:
        if (recorded := advantages[report.update]) is not None and recorded != report.advantages:
            others.append(report.update)

    async with aclosing(train_again(trainer, journal, 0, last, sampled, compare)) as again:
        async for made in again:
            version, recorded = made.version, checksums[made.version]
            same = f"the advantages of update {version - 1} {'differ too' if others else 'agree'}" if version else ""
            if made.checksum != recorded:
                difference = f"version {version} differs: recorded {recorded}, trained again {made.checksum}"
                difference += f"; {same}" if same else ""
                break
            if others:
                difference = f"version {version} agrees, and the advantages of update {others[0]} differ"
                break
            say(f"version {version} agrees: {recorded}")
    return RetrainResult(version, difference)
