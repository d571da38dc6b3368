"""The preparation of an update: all that must be known of a batch before its first optimizer step.

Passes without a gradient set the fields of each `MicroBatchPlan`. Advantages follow from rewards, and from these passes
if a critic or a divergence in the reward takes part.

| pass | sets | made if |
|---|---|---|
| under the sampling versions (`version_scoring.py`) | `sampled`, `is_scored` | the objective needs or measures them |
| under the policy as it is | `proximal` | the update has several steps |
| the same pass | `values` | there is a critic |
| under the reference (`reference_policy.py`) | `reference` | a divergence is measured |
| under the teachers (`teachers.py`) | `teachers` | the policy has teachers |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import TrainerError
from stretto.objectives.base import ObjectiveOptions
from stretto.training.advantages import Advantages
from stretto.training.batch_advantages import batch_advantages, refuse_large_rewards
from stretto.training.critic import Critic
from stretto.training.forward import PackedModel
from stretto.training.mini_batches import MicroBatchPlan, MiniBatch, micro_batch_plans
from stretto.training.options import TrainingOptions
from stretto.training.packing import MicroBatch
from stretto.training.parallel import Ranks
from stretto.training.policy_weights import PolicyWeights
from stretto.training.reference_policy import Reference
from stretto.training.regularizers import reward_penalties
from stretto.training.teachers import Teachers
from stretto.training.version_scoring import VersionScorer
from stretto.types import Batch


class PackMicroBatch(Protocol):
    """Packs a micro-batch for `packed`, or for the policy if it is None."""

    def __call__(self, batch: Batch, plan: MicroBatchPlan, packed: PackedModel | None = None, /) -> MicroBatch: ...


class UpdatePreparation:
    """Prepares the updates of a trainer. Leaves the policy as it was, bit for bit."""

    def __init__(
        self,
        packed: PackedModel,  # the policy
        policy: PolicyWeights,
        algorithm: ObjectiveOptions,
        ranks: Ranks,
        *,
        options: TrainingOptions,
        critic: Critic | None,
        reference: Reference | None,
        teachers: Teachers,
        temperature: float,  # that the engine samples with
        pack: PackMicroBatch,
        empty_pass: Callable[[Batch], torch.Tensor] | None,
    ) -> None:
        """`empty_pass` keeps this rank in step where passes are collective; None where they are not."""
        self._packed = packed
        self._algorithm = algorithm
        self._ranks = ranks
        self._critic = critic
        self._reference = reference
        self._teachers = teachers
        self._temperature = temperature
        self._pack = pack
        self._empty_pass = empty_pass
        self.scorer = VersionScorer(
            packed,
            policy,
            ranks,
            every_token=algorithm.needs_sampled,
            mismatch_samples=options.mismatch_samples,
            micro_tokens=options.micro_batch_tokens,
            temperature=temperature,
            pack=pack,
            empty_pass=empty_pass,
        )

    @property
    def advantages_need_passes(self) -> bool:
        """True if advantages can be computed only after `run_passes`."""
        kl = self._algorithm.kl
        return self._critic is not None or (kl is not None and kl.place == "reward")

    def run_passes(self, batch: Batch, mini_batches: Sequence[MiniBatch]) -> Sequence[Sequence[int]]:
        """Sets what must be known of each token of this rank's micro-batches.

        Returns the samples of all ranks that were scored under older versions, by version.
        """
        scored = self.scorer.score(batch, mini_batches)
        if len(mini_batches) > 1 or self._critic is not None:
            with self._packed.as_in_training():
                for plan in micro_batch_plans(mini_batches):
                    self._assess(batch, plan, proximal=len(mini_batches) > 1)
                if self._empty_pass is not None:
                    for _ in range(sum(mini_batch.num_empty_passes for mini_batch in mini_batches)):
                        self._empty_pass(batch)
        if self._reference is not None:
            self._reference.score(batch, micro_batch_plans(mini_batches), self._pack, self._temperature)
        self._teachers.score(batch, micro_batch_plans(mini_batches), self._pack)
        return scored

    def _assess(self, batch: Batch, plan: MicroBatchPlan, *, proximal: bool) -> None:
        """Sets what the policy before the update says of a micro-batch. What the pass keeps ends with this call.

        Without `proximal` the one step of the update uses the log-probabilities of its own forward pass.
        """
        micro = self._pack(batch, plan)
        states = self._packed.states(micro)
        if proximal:
            plan.proximal = self._packed.logprobs(micro, self._temperature, states=states)[0].detach()
        if self._critic is not None:
            plan.values = self._critic.values(states, micro.predicts).detach()

    def advantages(
        self, batch: Batch, mini_batches: Sequence[MiniBatch], rewards: NDArray[np.float64]
    ) -> tuple[Advantages, Mapping[str, float]]:
        """Returns the advantages from the shaped rewards of the whole batch, and the critic's metrics.

        Subtracts a divergence that is placed in the reward. Unless they need passes, `mini_batches` may be empty.
        Raises `TrainerError` if a reward is too large to compute with, or if the numbers do not fit.
        """
        plans = list(micro_batch_plans(mini_batches))
        penalties = reward_penalties(batch, plans, self._algorithm.kl, self._ranks.total)
        refuse_large_rewards(batch, rewards - penalties)
        try:
            if self._critic is None:
                return batch_advantages(batch, self._algorithm, rewards, penalties), {}
            by_turn = self._algorithm.turns is not None
            estimate = self._critic.assess(batch, plans, rewards - penalties, self._ranks.total, by_turn=by_turn)
            return estimate.advantages, estimate.metrics
        except ValueError as error:
            raise TrainerError(f"update {batch.update}: {error}") from error
