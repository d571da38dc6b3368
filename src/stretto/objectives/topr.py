"""TOPR: importance weights for wrong answers, none for right ones, and a factor for each of the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from stretto.objectives.base import Loss, RatioOptions, Tokens, bounded_exp, policy_gradient, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor


class ToprOptions(RatioOptions):
    """Tapered off-policy REINFORCE: imitates good answers, and pushes bad ones down while they are still likely."""

    formula: ClassVar[str] = (
        "positive_weight A log pi if the reward is above threshold, else negative_weight sg(clip(r, 0, cap)) A log pi"
    )
    when: ClassVar[str] = "Very stale data and binary rewards: good answers are learned whatever their age."
    ratio_options: ClassVar[tuple[str, ...]] = ("cap", "level")
    zero_without_advantage: ClassVar[bool] = True

    type: Literal["topr"] = "topr"
    threshold: float = Field(0.0, description="An answer with a reward above this is good")
    positive_weight: float = Field(1.0, ge=0, description="Factor of good answers")
    negative_weight: float = Field(1.0, ge=0, description="Factor of the other answers")
    cap: float = Field(1.0, ge=1, description="Upper bound of the ratio of the other answers, at least 1")
    level: Literal["token", "sequence"] = Field(
        "token",
        description="`token`: one ratio a token. `sequence`: the product over the sequence, as in the paper of TOPR",
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> ToprOptions:
        if self.positive_weight == 0 and self.negative_weight == 0:
            raise ValueError(
                "`algorithm.positive_weight = 0` and `algorithm.negative_weight = 0` train nothing: every loss is 0; "
                "set one of them above 0"
            )
        return self

    @property
    def corrects_off_policy(self) -> bool:
        return super().corrects_off_policy and self.negative_weight > 0

    def without_effect(self) -> dict[str, str]:
        found = super().without_effect()
        if self.negative_weight == 0:
            for name in ("anchor", "cap", "level"):
                found[name] = (
                    f"`algorithm.{name} = {getattr(self, name)!r}` has no effect with `algorithm.negative_weight = 0`: "
                    "only bad answers have a ratio; leave it out, or set `negative_weight` above 0"
                )
        return found

    def inactive_at_ratio_one(self) -> tuple[str, ...]:
        alike = (
            self.positive_weight == self.negative_weight
        )  # then only the ratio distinguishes good answers from bad ones
        return (*super().inactive_at_ratio_one(), *(("threshold",) if alike else ()))

    def _ratio(self, tokens: Tokens) -> Tensor:
        """The ratio of each token, or of its sequence [C], without gradient."""
        if self.level == "token":
            return self.ratio(tokens).detach()
        logs = (tokens.logprobs - tokens.anchor_logprobs(self.anchor)).detach()
        return bounded_exp(sequence_sum(logs, tokens))

    def loss(self, tokens: Tokens) -> Loss:
        import torch

        ratio = self._ratio(tokens)
        positive = tokens.rewards > self.threshold
        truncated = self.negative_weight * ratio.clamp(max=self.cap)
        weights = torch.where(positive, torch.full_like(ratio, self.positive_weight), truncated)
        diagnostics = {
            "positive_fraction": positive.to(ratio.dtype),
            "clip_fraction_high": (~positive & (ratio > self.cap)).to(ratio.dtype),
        }
        return policy_gradient(tokens, weights), diagnostics
