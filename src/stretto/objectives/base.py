"""The base of every objective: typed options with a loss for each token. Imports torch only to compute a loss.

An objective is a table of the recipe, `[algorithm] type = "..."`, and one file of this package. It turns the tokens of
a micro-batch into a loss for each token, to be minimized. The trainer multiplies the losses by weights of the whole
mini-batch (`average`) and sums them, so a mini-batch may be split into micro-batches between any two sequences.

Four log-probabilities of a token matter (`docs/algorithms.md` has a picture):

- *behaviour* `mu`: the version that sampled the token, computed by the engine and recorded when it was drawn;
- *sampled* `pi_w`: the same version, computed by the trainer;
- *proximal* `pi_n`: the policy at the start of the update, computed by the trainer;
- *current* `pi`: the policy in training, which has the gradient.

`pi_w / mu` is the discrepancy between engine and trainer, `pi_n / pi_w` the staleness of the data. The ratio of an
objective is the current policy over its `anchor`, which is one of the other three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from stretto.objectives.correction_options import CorrectionOptions, DiscrepancyOptions, StalenessOptions
from stretto.objectives.length_options import LengthOptions
from stretto.objectives.regularizer_options import EntropyOptions, KlOptions, SupervisedOptions
from stretto.objectives.teacher_options import TeacherOptions
from stretto.objectives.turn_options import TurnOptions
from stretto.options import Options

if TYPE_CHECKING:
    from torch import Tensor

Average = Literal["token", "sequence", "constant"]
Anchor = Literal["behaviour", "sampled", "proximal"]
AdvantageName = Literal["group", "group-mean", "leave-one-out", "whiten", "gae"]

MAX_LOG_RATIO = 20.0  # a ratio beyond exp(20) is meaningless as an importance weight; the bound keeps products finite


@dataclass(frozen=True, slots=True)
class Tokens:
    """The completion tokens of the whole sequences of one micro-batch, flat, without padding. All but
    `lengths` are [C].

    Only `logprobs` has a gradient. `advantages` may differ between the tokens of a sequence.
    """

    logprobs: Tensor  # under the current policy, with gradient
    behaviour: Tensor  # under the distribution that the engine sampled from
    proximal: Tensor  # under the policy at the start of the update; `logprobs.detach()` at its first optimizer step
    advantages: Tensor
    rewards: Tensor  # of the token's sequence, from the environment, without shaping
    sequences: Tensor  # int64 index of the token's sequence in the micro-batch
    num_sequences: int
    lengths: Tensor  # [num_sequences] tokens of each sequence
    sampled: Tensor | None = None  # the trainer's, under the version that sampled; None unless `needs_sampled`
    # int64 index of the token's turn among the turns of the micro-batch that have tokens; None unless `needs_turns`
    turns: Tensor | None = None

    def anchor_logprobs(self, anchor: Anchor) -> Tensor:
        """The log-probabilities under the anchor."""
        if anchor == "sampled":
            return self.scored
        return self.behaviour if anchor == "behaviour" else self.proximal

    @property
    def scored(self) -> Tensor:
        """The trainer's log-probabilities under the version that sampled, for an objective with `needs_sampled`."""
        assert self.sampled is not None, "the objective must have `needs_sampled`"
        return self.sampled


Loss = tuple["Tensor", dict[str, "Tensor"]]
"""The loss of each token [C], and named diagnostics of each token [C], which are averaged over the batch."""


def ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """`exp(logprobs - anchor)`, between `exp(-MAX_LOG_RATIO)` and `exp(MAX_LOG_RATIO)`."""
    return bounded_exp(logprobs - anchor)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential of a log-ratio clamped to `MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """The sum of `values` over each token's sequence [C]."""
    sums = values.new_zeros(tokens.num_sequences).index_add(0, tokens.sequences, values)
    return sums[tokens.sequences]


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """The mean of `values` over each token's sequence [C]."""
    return sequence_sum(values, tokens) / tokens.lengths[tokens.sequences].to(values.dtype)


def policy_gradient(tokens: Tokens, weights: Tensor | None = None) -> Tensor:
    """`-sg(weight) A log pi` [C]: the loss whose gradient is the policy gradient, with a weight for each token."""
    factor = tokens.advantages if weights is None else weights.detach() * tokens.advantages
    return -factor * tokens.logprobs


class ObjectiveOptions(Options):
    """The options that every objective has."""

    formula: ClassVar[str]  # that is maximized, for a token; shown in the documentation
    when: ClassVar[str]  # when to use it, in one sentence
    ratio_options: ClassVar[tuple[str, ...]] = ()  # options that act only through a ratio other than 1
    uses_critic: ClassVar[bool] = False
    zero_without_advantage: ClassVar[bool] = False  # a token with advantage 0 has no gradient, whatever the rest
    uses_rewards: ClassVar[bool] = True  # advantages are part of the loss

    type: str
    average: Average = Field(
        "token",
        description="How token losses are averaged. `token`: over all tokens. `sequence`: over each sequence, then "
        "over the sequences. `constant`: their sum divided by `average_tokens` times the number of sequences",
    )
    average_tokens: int | None = Field(
        None, ge=1, description='Divisor of `average = "constant"`; default: `rollout.max_tokens`'
    )
    advantage: AdvantageName = Field(
        "group",
        description="`group`: reward minus the group's mean, divided by the group's standard deviation. `group-mean`: "
        "without the division. `leave-one-out`: reward minus the mean of the others of its group. `whiten`: normalized "
        "over the batch. `gae`: from a critic",
    )
    whiten_over: Literal["batch", "version"] = Field(
        "batch",
        description='The samples that `advantage = "whiten"` normalizes over: the whole batch, or those of one version',
    )
    correction: CorrectionOptions | None = Field(
        None, description="Weights each token's loss by the policy before the update over the policy that sampled"
    )
    discrepancy_correction: DiscrepancyOptions | None = Field(
        None,
        description="The part of the correction weight that engine and trainer cause: the trainer's probability over "
        "the engine's, both under the version that sampled",
    )
    staleness_correction: StalenessOptions | None = Field(
        None,
        description="The part of the correction weight that the age of the data causes: the policy before the update "
        "over the version that sampled, both computed by the trainer",
    )
    mask_truncated: bool = Field(
        False, description="Do not train on completions that reached `max_tokens`; they still count in advantages"
    )
    mask_older_tokens: bool = Field(
        False,
        description="Of a trajectory with tokens of several versions, train only on those of its newest version",
    )
    kl: KlOptions | None = Field(None, description="Penalizes the divergence from a reference policy")
    teachers: tuple[TeacherOptions, ...] = Field(
        (), description="Models to imitate on the policy's own samples, each a table `[[algorithm.teachers]]`"
    )
    entropy: EntropyOptions | None = Field(None, description="Entropy bonus")
    supervised: SupervisedOptions | None = Field(None, description="Imitates trajectories with a high reward")
    length: LengthOptions | None = Field(None, description="Changes the reward by the length of the completion")
    turns: TurnOptions | None = Field(
        None, description="Credits each turn with the rewards from that turn on; only for tasks with several turns"
    )

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> ObjectiveOptions:
        if self.advantage == "gae" and not self.uses_critic:
            raise ValueError(
                f'`algorithm.advantage = "gae"` needs a critic, and `algorithm.type = "{self.type}"` has none; '
                'choose "group", "group-mean", "leave-one-out" or "whiten", or `algorithm.type = "ppo"`'
            )
        if self.turns is not None and self.turns.gamma != 1.0 and self.uses_critic:
            raise ValueError(
                f"`algorithm.turns.gamma = {self.turns.gamma}` has no effect with a critic, which discounts by token; "
                "leave it out and set `algorithm.critic.gamma`"
            )
        if self.correction is not None and (
            self.discrepancy_correction is not None or self.staleness_correction is not None
        ):
            raise ValueError(
                "`algorithm.correction` is the product of `algorithm.discrepancy_correction` and "
                "`algorithm.staleness_correction`: leave it out, or leave out both of them"
            )
        for name, twice in (
            ("correction", self.corrects_off_policy),
            ("staleness_correction", self.corrects_off_policy),
            ("discrepancy_correction", self.corrects_discrepancy),
        ):
            table: CorrectionOptions | None = getattr(self, name)
            if table is not None and table.mode == "cap" and twice:
                what = "the discrepancy between engine and trainer" if name == "discrepancy_correction" else "staleness"
                raise ValueError(
                    f'`algorithm.{name}` with `mode = "cap"` would correct for {what} twice: '
                    f"`{self.type}`{self._anchored_by} already weights tokens by their ratio to the policy that "
                    'sampled; leave it out, choose `mode = "filter"`, or a type and an `algorithm.anchor` without that '
                    "weight"
                )
        return self

    @property
    def corrects_off_policy(self) -> bool:
        """True if the formula itself weights tokens by a newer policy over the version that sampled."""
        return False

    @property
    def corrects_discrepancy(self) -> bool:
        """True if the formula itself weights tokens by a probability of the trainer over that of the engine."""
        return self.corrects_off_policy

    @property
    def needs_sampled(self) -> bool:
        """True if the loss uses the trainer's log-probabilities under the version that sampled (`Tokens.sampled`)."""
        return self.discrepancy_correction is not None or self.staleness_correction is not None

    @property
    def needs_turns(self) -> bool:
        """True if the loss uses the turn of each token (`Tokens.turns`)."""
        return any(table is not None and table.level == "turn" for table in self.corrections)

    @property
    def corrections(self) -> tuple[CorrectionOptions | None, ...]:
        """The tables of correction weights."""
        return self.correction, self.discrepancy_correction, self.staleness_correction

    @property
    def _anchored_by(self) -> str:
        return ""

    def without_effect(self) -> dict[str, str]:
        """Options that have no effect given the other options, each with the reason, whether they are set or not."""
        found = {}
        if self.average != "constant":
            found["average_tokens"] = (
                f"`algorithm.average_tokens = {self.average_tokens}` has no effect with "
                f'`algorithm.average = "{self.average}"`; leave it out, or choose "constant"'
            )
        if self.advantage != "whiten":
            found["whiten_over"] = (
                f'`algorithm.whiten_over = "{self.whiten_over}"` has no effect with `algorithm.advantage = '
                f'"{self.advantage}"`; leave it out, or choose "whiten"'
            )
        return found

    def inactive_at_ratio_one(self) -> tuple[str, ...]:
        """Options that have no effect if every ratio is 1."""
        return self.ratio_options

    def loss(self, tokens: Tokens) -> Loss:
        """Returns the loss of each token [C], to be minimized, and the diagnostics of each token [C]."""
        raise NotImplementedError


class RatioOptions(ObjectiveOptions):
    """An objective with a ratio of the current policy over its anchor."""

    anchor: Anchor = Field(
        "behaviour",
        description="Denominator of the ratio. `behaviour`: the version that sampled the token, as the engine computed "
        "it. `sampled`: the same version, as the trainer computes it. `proximal`: the policy at the start of the "
        "update",
    )

    @property
    def corrects_off_policy(self) -> bool:
        return self.anchor != "proximal"

    @property
    def corrects_discrepancy(self) -> bool:
        return self.corrects_off_policy and self.anchor != "sampled"

    @property
    def needs_sampled(self) -> bool:
        return super().needs_sampled or self.anchor == "sampled"

    @property
    def _anchored_by(self) -> str:
        return f' with `anchor = "{self.anchor}"`'

    def ratio(self, tokens: Tokens) -> Tensor:
        """The ratio of each token [C], with gradient."""
        return ratio(tokens.logprobs, tokens.anchor_logprobs(self.anchor))
