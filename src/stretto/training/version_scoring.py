"""Scores the tokens of a batch under the versions that sampled them: `pi_w`, as the trainer computes it.

The engine recorded `mu`, its own probability of each token when it was drawn. The trainer computes the same version a
little differently, so only its own probability separates the two reasons why the current policy differs from `mu`: the
arithmetic of engine and trainer (`pi_w / mu`) and the age of the data (`pi / pi_w`).

Each version that a batch holds takes one forward pass over the sequences with tokens of it, so a batch of pinned
trajectories costs one forward pass in all. The weights are those that were published. With LoRA they take the place of
the adapters; with full weights the parameters point at them, once they are on the device. Tokens of the newest version
cost nothing: their log-probabilities are those at the start of the update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stretto.errors import LostObjectError, TrainerError
from stretto.models.checksums import checksum
from stretto.training.forward import PackedModel
from stretto.training.mini_batches import MicroBatchPlan, MiniBatch, computed_samples, micro_batch_plans
from stretto.training.packing import MicroBatch
from stretto.training.parallel import Ranks
from stretto.training.policy_weights import PolicyWeights
from stretto.training.sequence_sizes import SequenceSizes
from stretto.types import Batch, Sample, Weights, WeightsRef, older_versions

log = logging.getLogger(__name__)

# Updates between two measurements. Each is a pass of a few sequences for every version, which costs a small model as
# many launches as its update; full weights have to be brought to the device, too.
ADAPTERS_EVERY = 4
FULL_WEIGHTS_EVERY = 8


@dataclass(frozen=True, slots=True)
class VersionPasses:
    """The forward passes under one version."""

    version: int
    micro_batches: list[tuple[int, ...]]  # of this rank: indices into the batch
    most: int  # passes of the rank with the most


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """The tokens of one sample [c]: `values` counts where `is_scored`."""

    values: torch.Tensor
    is_scored: torch.Tensor  # bool


def version_passes(
    batch: Batch,
    chosen: Sequence[int],
    shares: Sequence[Sequence[int]],
    *,
    rank: int,
    micro_tokens: int,
    shares_prompts: bool = False,
) -> list[VersionPasses]:
    """Plans the passes that score the `chosen` samples, oldest version first. `shares` are the samples of each rank."""
    if not chosen:
        return []
    sizes, wanted = SequenceSizes.of(batch.samples, shares_prompts=shares_prompts), dict[int, set[int]]()
    for index in chosen:
        for version in older_versions([batch.samples[index]], batch.update):
            wanted.setdefault(version, set()).add(index)
    passes = []
    for version, of_version in sorted(wanted.items()):
        bins = []
        for share in shares:
            own = np.array([index for index in share if index in of_version], dtype=np.int64)
            bins.append([tuple(own[each].tolist()) for each in sizes[own].bins(micro_tokens)])
        passes.append(VersionPasses(version, bins[rank], max(map(len, bins))))
    return passes


def sample_for_mismatch(batch: Batch, computed: Sequence[int], count: int, *, one_version: bool) -> list[int]:
    """Chooses up to `count` of the `computed` samples that are of older versions whose weights the batch brings.

    They are spread over the versions in turn, or taken from one version that changes with the update. The choice
    follows from the batch alone.
    """
    by_version: dict[int, list[int]] = {}
    for index in computed:
        older = older_versions([batch.samples[index]], batch.update)
        if older and all(version in batch.versions for version in older):
            by_version.setdefault(older[-1], []).append(index)
    versions = sorted(by_version)
    if one_version and versions:
        versions = [versions[batch.update % len(versions)]]
    turned = [np.roll(by_version[version], -batch.update).tolist() for version in versions]
    chosen: list[int] = []
    for position in range(max(map(len, turned), default=0)):
        chosen += [queue[position] for queue in turned if position < len(queue)]
    return sorted(chosen[:count])


class VersionScorer:
    """Scores samples under older versions, with the model of a trainer."""

    def __init__(
        self,
        packed: PackedModel,
        policy: PolicyWeights,
        ranks: Ranks,
        *,
        every_token: bool,
        mismatch_samples: int,
        micro_tokens: int,
        temperature: float,
        pack: Callable[[Batch, MicroBatchPlan], MicroBatch],
        empty_pass: Callable[[Batch], torch.Tensor] | None,
    ) -> None:
        """`every_token`: the objective needs every token. Otherwise `mismatch_samples` are scored, to measure.

        `empty_pass` keeps this rank in step where passes are collective; None where they are not.
        """
        self._packed = packed
        self._policy = policy
        self._ranks = ranks
        self._every_token = every_token
        self._mismatch_samples = mismatch_samples
        self._micro_tokens = micro_tokens
        self._temperature = temperature
        self._pack = pack
        self._empty_pass = empty_pass

    def score(self, batch: Batch, mini_batches: Sequence[MiniBatch]) -> list[list[int]]:
        """Sets `sampled` and `is_scored` of this rank's micro-batches. Returns the samples of all ranks by version.

        Restores the policy bit for bit. Raises `TrainerError` if the objective needs a version that the batch does not
        bring, and `LostObjectError` if it needs one that cannot be read. What is only measured does without them.
        """
        chosen = self._choose(batch, computed_samples(mini_batches))
        shares = [
            [index for mini_batch in mini_batches for index in mini_batch.shares[rank]]
            for rank in range(self._ranks.count)
        ]
        budget = batch.micro_tokens or self._micro_tokens
        passes = version_passes(
            batch,
            chosen,
            shares,
            rank=self._ranks.rank,
            micro_tokens=budget,
            shares_prompts=self._packed.shares_prompts,
        )
        found = self._run(batch, passes)
        for plan in micro_batch_plans(mini_batches):
            if any(index in found for index in plan.samples):
                whole = [found.get(index) or self._unscored(batch.samples[index]) for index in plan.samples]
                plan.sampled = torch.cat([each.values for each in whole])
                plan.is_scored = torch.cat([each.is_scored for each in whole])
        older = {index: older_versions([batch.samples[index]], batch.update) for index in chosen}
        return [[index for index in chosen if each.version in older[index]] for each in passes]

    def _choose(self, batch: Batch, computed: Sequence[int]) -> list[int]:
        if self._every_token:
            return [index for index in computed if older_versions([batch.samples[index]], batch.update)]
        every = FULL_WEIGHTS_EVERY if self._policy.lora is None else ADAPTERS_EVERY
        if (batch.update + 1) % every:
            return []
        return sample_for_mismatch(batch, computed, self._mismatch_samples, one_version=self._policy.lora is None)

    def _unscored(self, sample: Sample) -> ScoredSample:
        device, count = self._packed.head.weight.device, sample.completion.num_sampled
        values = torch.zeros(count, device=device)
        return ScoredSample(values, torch.zeros(count, dtype=torch.bool, device=device))

    def _run(self, batch: Batch, passes: Sequence[VersionPasses]) -> dict[int, ScoredSample]:
        """Returns the scored samples of this rank by their index."""
        found: dict[int, ScoredSample] = {}
        for each in passes:
            if not each.micro_batches and self._empty_pass is None:
                continue
            if (weights := self._weights(batch, each.version)) is None:
                continue
            with self._policy.installed(weights), self._packed.as_in_training():
                for samples in each.micro_batches:
                    self._score_micro_batch(batch, samples, each.version, found)
                if self._empty_pass is not None:
                    for _ in range(each.most - len(each.micro_batches)):
                        self._empty_pass(batch)
            del weights  # before those of the next version are read
        return found

    def _score_micro_batch(
        self, batch: Batch, samples: tuple[int, ...], version: int, found: dict[int, ScoredSample]
    ) -> None:
        micro = self._pack(batch, MicroBatchPlan(samples))
        scores = self._packed.scores(micro, self._temperature)
        for index, own in zip(samples, torch.split(scores, list(micro.num_targets)), strict=True):
            here = torch.from_numpy(batch.samples[index].token_versions == version).to(own.device)
            if index in found:
                before = found[index]
                own = torch.where(here, own, before.values)
                here = here | before.is_scored
            found[index] = ScoredSample(own, here)

    def _weights(self, batch: Batch, version: int) -> Weights | None:
        """Returns the weights of a version; None if they cannot be read and the objective does not need them."""
        weights, lost = None, None
        try:
            weights = self._read(batch, version)
        except LostObjectError as error:
            lost = str(error)
        if self._empty_pass is not None:  # passes are collective: every rank has the weights, or none makes the pass
            lost = next((each for each in self._ranks.gathered(lost) if each is not None), None)
        if lost is None:
            return weights
        if self._every_token:
            raise LostObjectError(
                f"update {batch.update} scores tokens under version {version}, which sampled them, and its weights "
                f"cannot be read: {lost}; `--resume` makes them again from a checkpoint and the journal"
            )
        log.warning("update %d does not compare engine and trainer under version %d: %s", batch.update, version, lost)
        return None

    def _read(self, batch: Batch, version: int) -> Weights:
        asked: Weights | WeightsRef | None = batch.versions.get(version)
        if asked is None:
            raise TrainerError(
                f"update {batch.update} scores tokens under version {version}, which sampled them, and its weights are "
                "not in `Batch.versions`: add them; in a run, `--resume` makes them again"
            )
        if isinstance(asked, Weights):
            return asked
        fetched = asked.fetch()
        if checksum(fetched.tensors, fetched.scale) != asked.checksum:
            raise LostObjectError(f"those that arrived have another checksum than {asked.checksum}")
        return fetched
