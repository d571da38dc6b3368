"""Scores recorded trajectories again under the versions that sampled them (`stretto verify RUN --recompute N`).

A journal that was rewritten as a whole agrees with itself. Its log-probabilities, however, must be those of weights
that exist: those of a version file, as long as it is on the disk, or those that training the recorded batches again
gives, as `stretto replay` does. Whoever changes a token, a log-probability or the version of a trajectory cannot also
change these. The trainer's forward pass and the engine's differ by rounding only, so a tolerance by type is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.assembly.retrain import made_trainer, recorded_recipe
from stretto.errors import RunError
from stretto.local.trainer import ThreadedTrainer
from stretto.models.routing import is_mixture
from stretto.run.phases import Phases
from stretto.setup.trainer_recovery import bring_back, refuse_another_base, usable_checkpoint
from stretto.store.reader import JournalReader
from stretto.store.resume_point import recorded_checksums
from stretto.store.schema import journal_path
from stretto.store.version_files import VersionFiles
from stretto.training.recorded_logprobs import rescore, rescore_under, tolerance
from stretto.training.trainer import LocalTrainer
from stretto.types import Sample


@dataclass(slots=True)
class RecomputeResult:
    """The trajectories that were scored again, and those that differ."""

    num_asked: int
    num_trained: int  # trajectories of the run that were trained on
    num_checked: int = 0
    num_tokens: int = 0
    from_files: list[int] = field(default_factory=list)  # versions whose weights were read
    trained_again: list[int] = field(default_factory=list)  # versions that were made again
    largest: float = 0.0  # difference of a log-probability
    breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        versions = f"{len(self.from_files)} versions from their files, {len(self.trained_again)} trained again"
        asked = "" if self.num_asked == self.num_checked else f" of {self.num_asked} asked for"
        lines = [
            f"recomputed: {self.num_checked}{asked} of {self.num_trained:,} trained trajectories, {self.num_tokens:,} "
            f"tokens ({versions}); largest difference {self.largest:.2g}: "
            + (f"BROKEN {len(self.breaks)}" if self.breaks else "all are of the versions that sampled them"),
            *(f"  - {sentence}" for sentence in self.breaks),
        ]
        return "\n".join(lines)


def recompute(folder: Path, count: int, *, say: Callable[[str], None] = lambda text: None) -> RecomputeResult:
    """Scores `count` trained trajectories, spread over the run, under the versions that sampled them.

    Raises `RunError` if the run cannot be scored again.
    """
    journal = journal_path(folder)
    with JournalReader(journal) as reader:
        trained = reader.trained()
        places = np.unique(np.linspace(0, len(trained) - 1, min(count, len(trained))).round().astype(int)).tolist()
        samples = [sample for place in places for sample in reader.trained_samples(trained[place])]
    if not samples:
        raise RunError(f"the run in `{folder}` has trained on nothing, so there is nothing to score again")
    recipe = recorded_recipe(folder)
    phases = Phases.recorded(journal) or Phases.only(recipe)
    trainer = made_trainer(recipe, say, phases.learning_rates)
    try:
        result = RecomputeResult(count, len(trained))
        asyncio.run(_Scoring(trainer, samples, result, ages=phases.retrained_ages).run(folder, journal, say))
        return result
    finally:
        trainer.close()


class _Scoring:
    """Collects the log-probabilities of samples, version by version."""

    def __init__(
        self, trainer: ThreadedTrainer, samples: Sequence[Sample], result: RecomputeResult, *, ages: int
    ) -> None:
        """Updates that are trained again need versions up to `ages` older than their own."""
        assert isinstance(trainer.trainer, LocalTrainer)
        self._trainer, self._local = trainer, trainer.trainer
        self._samples = samples
        self._result = result
        self._ages = ages
        self._versions = [sample.token_versions for sample in samples]
        # NaN: the version of that token was not reached, so it is not compared.
        self._scored = [np.full(len(versions), np.nan) for versions in self._versions]

    async def run(self, folder: Path, journal: Path, say: Callable[[str], None]) -> None:
        """Scores all samples and compares them."""
        await refuse_another_base(self._trainer, journal)
        checksums = recorded_checksums(journal)
        files = VersionFiles(folder / "versions")
        try:
            missing = await self._from_files(files, checksums)
            if missing:
                await self._by_training(folder, journal, missing, checksums, files, say)
        finally:
            files.close()
        self._compare()

    async def _from_files(self, files: VersionFiles, checksums: Mapping[int, str]) -> list[int]:
        """Scores under the versions that are on the disk. Returns the others."""
        missing: list[int] = []
        for version in sorted({int(each) for versions in self._versions for each in versions}):
            weights = files.read(version, checksums.get(version, ""))
            if weights is None:
                missing.append(version)
                continue
            await self._score(version, partial(rescore_under, self._local, weights))
            self._result.from_files.append(version)
        return missing

    async def _by_training(
        self,
        folder: Path,
        journal: Path,
        missing: Sequence[int],
        checksums: Mapping[int, str],
        files: VersionFiles,
        say: Callable[[str], None],
    ) -> None:
        """Scores under versions that are trained again, on the way to the last of them."""
        checkpoint, sampled = await usable_checkpoint(
            folder, min(missing), max(missing),
            ages=self._ages, journal=journal, checksums=checksums,
            versions=files, say=say,
        )  # fmt: skip
        way = bring_back(
            self._trainer, checkpoint, max(missing),
            journal=journal, checksums=checksums, versions=files, sampled=sampled, needed=frozenset(missing), say=say,
        )  # fmt: skip
        async for made in way:
            await self._score(made.version, partial(rescore, self._local))
            self._result.trained_again.append(made.version)

    async def _score(self, version: int, score: Callable[[Sequence[Sample]], list[NDArray[np.float64]]]) -> None:
        """Scores the tokens of this version; `score` does it in the trainer's thread."""
        chosen = [index for index, versions in enumerate(self._versions) if (versions == version).any()]
        samples = [self._samples[index] for index in chosen]
        scored = await self._trainer.call(lambda: score(samples), f"scoring under version {version}")
        for index, values in zip(chosen, scored, strict=True):
            own = self._versions[index] == version
            self._scored[index][own] = values[own]

    def _compare(self) -> None:
        result, dtype, checked = self._result, self._local.packed.head.weight.dtype, set[int]()
        is_free = self._local.routing is None and is_mixture(self._local.model.config)
        tie = "; no routing was recorded, and near a tie another expert makes more than rounding" if is_free else ""
        for sample, scored in zip(self._samples, self._scored, strict=True):
            recorded = sample.completion.logprobs[sample.completion.sampled].astype(np.float64)
            known = ~np.isnan(scored)
            if not known.any():
                continue
            differences = np.abs(recorded - scored)[known]
            by_token, mean = tolerance(dtype, recorded[known])
            checked.add(sample.trajectory)
            result.num_checked = len(checked)
            result.num_tokens += int(known.sum())
            result.largest = max(result.largest, float(differences.max()))
            if not ((differences <= by_token).all() and differences.mean() <= mean):  # so that NaN is a break
                result.breaks.append(
                    f"trajectory {sample.trajectory} does not have the log-probabilities of version "
                    f"{sample.version}, which is said to have sampled it: they differ by {differences.mean():.2g} on "
                    f"average and {differences.max():.2g} at most; rounding makes {mean:g} and {by_token.min():g}{tie}"
                )
