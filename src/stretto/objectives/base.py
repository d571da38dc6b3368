"""What every objective is: typed options with a loss for each token. Free of torch until a loss is made.

An objective is a table of the recipe, `[algorithm] type = "..."`, and one file of this package. It turns the tokens of
a micro-batch into a loss for each of them, to be minimized; the trainer multiplies the losses by weights of the whole
batch (`average`) and adds them up, so that a batch may be cut into micro-batches between any two sequences.

Three policies occur: the *current* one, which has the gradient; the *behaviour* policy, whose log-probabilities the
engine sampled with; and the *proximal* one, the policy at the start of the update. The ratio of an objective is the
current policy over its `anchor`, one of the other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.objectives.correction_options import CorrectionOptions
from stretto.objectives.shaping_options import LengthOptions
from stretto.objectives.term_options import EntropyOptions, KlOptions, SupervisedOptions
from stretto.objectives.turn_options import TurnOptions

if TYPE_CHECKING:
    from torch import Tensor

Average = Literal["token", "sequence", "constant"]
Anchor = Literal["behaviour", "proximal"]
AdvantageName = Literal["group", "group-mean", "leave-one-out", "whiten", "gae"]

MAX_LOG_RATIO = 20.0  # beyond exp(20) a ratio is no importance weight any more; the bound keeps its products finite


@dataclass(frozen=True, slots=True)
class Tokens:
    """The completion tokens of one micro-batch, flat, without padding: whole sequences only. All are [C] but the last.

    Only `logprobs` has a gradient. `advantages` may differ between the tokens of a sequence.
    """

    logprobs: Tensor  # under the current policy, with gradient
    behaviour: Tensor  # under the distribution that the engine sampled from
    proximal: Tensor  # under the policy at the start of the update; `logprobs.detach()` at its first optimizer step
    advantages: Tensor
    rewards: Tensor  # of the token's sequence, as the environment gave it
    sequences: Tensor  # which sequence of the micro-batch, from 0, int64
    num_sequences: int
    lengths: Tensor  # [num_sequences] tokens of each sequence

    def anchored(self, anchor: Anchor) -> Tensor:
        """The log-probabilities under the policy that the ratio is taken against."""
        return self.behaviour if anchor == "behaviour" else self.proximal


Loss = tuple["Tensor", dict[str, "Tensor"]]
"""A loss for each token [C], and values of each token [C] that are averaged over the batch under their names."""


def ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """`exp(logprobs - anchor)`, between `exp(-MAX_LOG_RATIO)` and `exp(MAX_LOG_RATIO)`."""
    return bounded_exp(logprobs - anchor)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential of a log-ratio that is held within `MAX_LOG_RATIO` of 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """At each token the sum of `values` over its sequence [C]."""
    sums = values.new_zeros(tokens.num_sequences).index_add(0, tokens.sequences, values)
    return sums[tokens.sequences]


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """At each token the mean of `values` over its sequence [C]."""
    return sequence_sum(values, tokens) / tokens.lengths[tokens.sequences].to(values.dtype)


def policy_gradient(tokens: Tokens, weights: Tensor | None = None) -> Tensor:
    """`-sg(weight) A log pi`: a loss whose gradient is that of the policy, each token by its weight [C]."""
    factor = tokens.advantages if weights is None else weights.detach() * tokens.advantages
    return -factor * tokens.logprobs


class ObjectiveOptions(BaseModel):
    """The options that every objective has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    formula: ClassVar[str]  # what is maximized, for a token; shown in the documentation
    when: ClassVar[str]  # when to use it, in one sentence
    ratio_options: ClassVar[tuple[str, ...]] = ()  # options that act only through a ratio that may differ from 1
    uses_critic: ClassVar[bool] = False

    type: str
    average: Average = Field(
        "token",
        description="How the losses of tokens become one: their mean, the mean of the sequences' means, or their sum "
        "over `average_tokens` times the number of sequences",
    )
    average_tokens: int | None = Field(
        None, ge=1, description='What `average = "constant"` divides by, such as the longest completion'
    )
    advantage: AdvantageName = Field(
        "group",
        description="Reward minus the mean of its group, over the group's standard deviation (`group`) or not "
        "(`group-mean`); minus the mean of the others of its group; whitened over the batch; or by a critic",
    )
    correction: CorrectionOptions | None = Field(
        None, description="Weighs each token's loss by the policy before the update over the one that sampled it"
    )
    kl: KlOptions | None = Field(None, description="Keeps the policy near a reference")
    entropy: EntropyOptions | None = Field(None, description="A bonus for entropy")
    supervised: SupervisedOptions | None = Field(None, description="Imitates trajectories with a good reward")
    length: LengthOptions | None = Field(None, description="Changes rewards by the length of a completion")
    turns: TurnOptions | None = Field(
        None, description="Credits each turn of an episode with what was earned from it on; only for tasks with turns"
    )

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> ObjectiveOptions:
        if self.average == "constant" and self.average_tokens is None:
            raise ValueError(
                '`algorithm.average_tokens` is missing: `algorithm.average = "constant"` divides by it; '
                "set it to what `rollout.max_tokens` is"
            )
        if self.advantage == "gae" and not self.uses_critic:
            raise ValueError(
                f'`algorithm.advantage = "gae"` needs a critic, and `algorithm.type = "{self.type}"` has none; '
                'choose "group", "group-mean", "leave-one-out" or "whiten", or `algorithm.type = "ppo"`'
            )
        if self.turns is not None and self.turns.gamma != 1.0 and self.uses_critic:
            raise ValueError(
                f"`algorithm.turns.gamma = {self.turns.gamma}` has no effect with a critic, which discounts by token; "
                "leave it out, and set `algorithm.critic.gamma`"
            )
        if self.correction is not None and self.correction.mode == "cap" and self.corrects:
            raise ValueError(
                '`algorithm.correction` with `mode = "cap"` would count the age of a trajectory twice: '
                f"`{self.type}`{self._anchored_by} weighs tokens against the policy that sampled them by itself; leave "
                'it out, choose `mode = "filter"`, or a type and an `algorithm.anchor` without that weight'
            )
        return self

    @property
    def corrects(self) -> bool:
        """Whether the formula itself weighs tokens by a newer policy over the behaviour policy."""
        return False

    @property
    def _anchored_by(self) -> str:
        return ""

    def without_effect(self) -> dict[str, str]:
        """Options of its own that cannot act beside its others, each with the reason, whether they are set or not."""
        if self.average == "constant":
            return {}
        return {
            "average_tokens": f"`algorithm.average_tokens = {self.average_tokens}` has no effect with "
            f'`algorithm.average = "{self.average}"`; leave it out, or choose "constant"'
        }

    def idle_at_ratio_one(self) -> tuple[str, ...]:
        """Options of its own that cannot act where every ratio is 1."""
        return self.ratio_options

    def loss(self, tokens: Tokens) -> Loss:
        """The loss of each token [C], to be minimized, and the diagnostics of each token."""
        raise NotImplementedError


class RatioOptions(ObjectiveOptions):
    """An objective with a ratio of the current policy over another one."""

    anchor: Anchor = Field(
        "behaviour",
        description="What the ratio is taken against: the policy that sampled the token, or the policy at the start "
        "of the update",
    )

    @property
    def corrects(self) -> bool:
        return self.anchor == "behaviour"

    @property
    def _anchored_by(self) -> str:
        return f' with `anchor = "{self.anchor}"`'

    def ratio(self, tokens: Tokens) -> Tensor:
        """The ratio of each token [C], with gradient."""
        return ratio(tokens.logprobs, tokens.anchored(self.anchor))
