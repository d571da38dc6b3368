"""Teachers: frozen models that the policy imitates on its own samples (on-policy distillation).

A teacher adds `coefficient * KL(pi || teacher)` to the loss of each token that the policy sampled. There are two forms:

- `full`: the divergence between the two distributions at the token, over the whole vocabulary or over the teacher's
  likeliest tokens. Given the tokens before it, it is exact, whatever version sampled the token, so that it has no
  importance weight.
- `sampled`: the policy gradient with the advantage `-(log pi - log teacher)` of the sampled token and no discount. It
  is the estimator `k2` of `regularizers.py`: its gradient is that of the divergence over tokens of `pi`, and a token
  that `mu` sampled is weighted by `sg(min(pi / mu, 2))`.

Both sum over the states that the sampling version reached, and neither differentiates the probability of reaching them.

Every update scores its batch under the teachers before its first step, so that a teacher may leave the device before
the policy's passes: `full` keeps the last hidden states of the teacher and its head, `top_k` the likeliest tokens, and
`sampled` one number a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto.errors import ModelError
from stretto.objectives.base import ObjectiveOptions, Tokens
from stretto.objectives.teacher_options import TeacherOptions
from stretto.training.distribution_divergence import (
    HeadDistributions,
    TeacherDistributions,
    distribution_divergence,
)
from stretto.training.flops import Costs
from stretto.training.forward import PackedModel
from stretto.training.logit_kernels import LogitScale
from stretto.training.logprobs import token_logprobs
from stretto.training.mini_batches import MicroBatchPlan
from stretto.training.packing import MicroBatch
from stretto.training.parallel import Ranks
from stretto.training.reference_policy import Reference
from stretto.training.regularizers import weighted_divergence
from stretto.training.taught_samples import taught_by
from stretto.training.update_metrics import PARTIAL, TEACHER_AGREEMENT, TEACHER_KL, TokenValues
from stretto.types import Batch

Pack = Callable[[Batch, MicroBatchPlan, PackedModel], MicroBatch]
"""Packs a micro-batch for a model."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The teacher's values for its tokens of a micro-batch."""

    teacher: int
    places: torch.Tensor | None  # [c] int64: its tokens among those of the micro-batch; None: all of them
    logprobs: torch.Tensor | None = None  # [c], of the sampled tokens
    distributions: TeacherDistributions | None = None


class Teacher:
    """One teacher. `shared` is the number of tokens at the beginning of the vocabulary that it has in common."""

    def __init__(self, options: TeacherOptions, model: nn.Module, shared: int, temperature: float) -> None:
        self.options = options
        self._reference = Reference.of_model(model, on_host=options.keep == "host", keeps_head=self._keeps_head)
        self.costs: Costs = self._reference.costs
        self._packed = self._reference.packed
        self.shared = shared
        self._scale = LogitScale(temperature, self._packed.softcap, self._packed.multiplier)

    @property
    def shares_prompts(self) -> bool:
        """True if its passes compute a prompt once for all samples that have it."""
        return self._packed.shares_prompts

    @property
    def _keeps_head(self) -> bool:
        """True if the policy's passes need the head of the teacher."""
        return self.options.form == "full" and self.options.top_k is None

    def score(
        self, index: int, batch: Batch, plans: Iterable[tuple[MicroBatchPlan, tuple[int, ...]]], pack: Pack
    ) -> None:
        """Adds the scores of teacher `index` to micro-batches, each given with those of its samples that it teaches."""
        with self._reference.active() as packed, packed.as_in_training():
            for plan, own in plans:
                micro = pack(batch, MicroBatchPlan(own), packed)
                vocabulary = packed.model.get_input_embeddings().num_embeddings
                micro = replace(micro, input_ids=micro.input_ids.clamp(max=vocabulary - 1))
                states = packed.states(micro).detach()
                with torch.no_grad():
                    scores = self._scores(index, _places(batch, plan, own), micro, states)
                plan.teachers = (*plan.teachers, scores)

    def _scores(
        self, index: int, places: torch.Tensor | None, micro: MicroBatch, states: torch.Tensor
    ) -> TeacherScores:
        places = None if places is None else places.to(states.device)
        head = self._packed.head
        if self.options.form == "sampled":
            targets = micro.targets.clamp(max=self.shared - 1)
            logprobs, _ = token_logprobs(
                states, head.weight[: self.shared], micro.predicts, targets,
                bias=None if head.bias is None else head.bias[: self.shared],
                temperature=self._scale.temperature, softcap=self._scale.softcap, multiplier=self._scale.multiplier,
                supports=micro.supports,
            )  # fmt: skip
            return TeacherScores(index, places, logprobs=logprobs.detach())
        rows = states.index_select(0, micro.predicts)
        made = HeadDistributions(rows, head.weight, head.bias, self._scale, self.shared)
        if self.options.top_k is not None:
            return TeacherScores(index, places, distributions=made.likeliest(self.options.top_k))
        return TeacherScores(index, places, distributions=made)


class Teachers:
    """The teachers of an objective, in its order."""

    def __init__(
        self,
        algorithm: ObjectiveOptions,
        models: Sequence[nn.Module],
        policy: PackedModel,
        ranks: Ranks,
        *,
        vocabulary: int | None,  # tokens that the tokenizer has; None: all that a model has
        temperature: float,
    ) -> None:
        if len(models) != len(algorithm.teachers):
            raise ModelError(
                f"`algorithm.teachers` names {len(algorithm.teachers)} teachers, and {len(models)} models were given"
            )
        self._algorithm, self._policy = algorithm, policy
        self._scale = LogitScale(temperature, policy.softcap, policy.multiplier)
        self.members: list[Teacher] = []
        for index, (options, model) in enumerate(zip(algorithm.teachers, models, strict=True)):
            ranks.check_same(dict(model.named_parameters()), f"algorithm.teachers[{index}]")
            head: int = model.get_output_embeddings().out_features  # type: ignore[operator]
            shared = min(head, policy.head.out_features, vocabulary or head)
            if options.top_k is not None and options.top_k > shared:
                raise ModelError(too_many_tokens(index, options.top_k, shared))
            self.members.append(Teacher(options, model, shared, temperature))

    def score(self, batch: Batch, plans: Iterable[MicroBatchPlan], pack: Pack) -> None:
        """Sets `teachers` of the micro-batches of an update. Each teacher is on the device once."""
        found, of_sample = list(plans), taught_by(batch.samples, self._algorithm.teachers)
        for plan in found:
            plan.teachers = ()
        for index, teacher in enumerate(self.members):
            own = [(plan, tuple(i for i in plan.samples if of_sample[i] == index)) for plan in found]
            if chosen := [(plan, samples) for plan, samples in own if samples]:
                teacher.score(index, batch, chosen, pack)

    def flops(self, batch: Batch, computed: Sequence[int]) -> float:
        """The operations of scoring the samples that an update computes."""
        of_sample, total = taught_by(batch.samples, self._algorithm.teachers), 0.0
        for index, teacher in enumerate(self.members):
            own = [batch.samples[each] for each in computed if of_sample[each] == index]
            total += teacher.costs.forward(replace(batch, samples=own)) if own else 0.0
        return total

    def loss(
        self, plan: MicroBatchPlan, micro: MicroBatch, states: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns a micro-batch's share of the teachers' term, and diagnostics, NaN at tokens without a teacher."""
        total = torch.zeros((), dtype=tokens.logprobs.dtype, device=tokens.logprobs.device)
        kl, agreement = torch.full((2, len(micro.targets)), torch.nan, dtype=total.dtype, device=total.device).unbind()
        for scores in plan.teachers:
            teacher = self.members[scores.teacher]
            chosen = slice(None) if scores.places is None else scores.places
            # A padding row of the policy's head may be drawn, though it stands for nothing: no teacher knows it.
            known = micro.targets[chosen] < teacher.shared
            weights = micro.weights[chosen] * known * teacher.options.coefficient
            if scores.distributions is not None:
                losses, kl[chosen], agreement[chosen] = self._full(scores.distributions, micro, chosen, states, teacher)
            else:
                assert scores.logprobs is not None
                losses, kl[chosen] = _sampled(scores.logprobs, tokens, chosen)
            total = total + torch.dot(losses, weights)
        return total, {TEACHER_KL: kl, TEACHER_AGREEMENT: agreement}

    def _full(
        self,
        distributions: TeacherDistributions,
        micro: MicroBatch,
        chosen: slice | torch.Tensor,
        states: torch.Tensor,
        teacher: Teacher,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The losses of tokens, with gradient, the same without, and agreement."""
        losses, agreement = distribution_divergence(
            states, self._policy.head.weight, micro.predicts[chosen], distributions, teacher.shared,
            bias=self._policy.head.bias, scale=self._scale,
        )  # fmt: skip
        return losses, losses.detach(), agreement


def _sampled(teacher: torch.Tensor, tokens: Tokens, chosen: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of tokens, with gradient, and unbiased estimates of their divergences."""
    own, behaviour, of_teacher = tokens.logprobs[chosen], tokens.behaviour[chosen], teacher.to(tokens.logprobs.dtype)
    losses = weighted_divergence("k2", own, of_teacher, behaviour)
    return losses, weighted_divergence("k1", own.detach(), of_teacher, behaviour)


def _places(batch: Batch, plan: MicroBatchPlan, own: tuple[int, ...]) -> torch.Tensor | None:
    """The tokens of some samples of a micro-batch among all of its tokens; None for all of them."""
    if len(own) == len(plan.samples):
        return None
    lengths = [batch.samples[index].completion.num_sampled for index in plan.samples]
    is_own = np.isin(np.asarray(plan.samples), np.asarray(own))
    return torch.from_numpy(np.flatnonzero(np.repeat(is_own, lengths)))


def teacher_metrics(batch: Batch, algorithm: ObjectiveOptions, tokens: TokenValues) -> dict[str, float]:
    """The mean divergence from the teachers and the share of agreement, over all and, of several, by teacher."""
    if not algorithm.teachers or TEACHER_KL not in tokens.diagnostics:
        return {}
    of_token = taught_by(batch.samples, algorithm.teachers)[tokens.samples]
    chosen: dict[str, NDArray[np.bool_]] = {"": of_token >= 0}
    if len(algorithm.teachers) > 1:
        chosen |= {f"_{index}": of_token == index for index in range(len(algorithm.teachers))}
    found = {}
    for name in PARTIAL:
        values = tokens.diagnostics[name]
        for suffix, own in chosen.items():
            measured = values[own & ~np.isnan(values)]
            if len(measured):
                found[name + suffix] = float(measured.mean())
    return found


def too_many_tokens(index: int, top_k: int, shared: int) -> str:
    """The sentence that refuses a `top_k` that is larger than the vocabulary."""
    return (
        f"`algorithm.teachers[{index}].top_k = {top_k}` is more than the vocabulary of {shared:,} tokens; use at most "
        f"{shared}, or leave it out"
    )
