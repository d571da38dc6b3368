"""TOPR: importance weights for what was wrong, none for what was right; with weights on the two parts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stretto.objectives.base import Loss, RatioOptions, Tokens, policy_gradient


class ToprOptions(RatioOptions):
    """Tapered off-policy REINFORCE, weighted: good answers are imitated, bad ones pushed down while still likely."""

    formula: ClassVar[str] = (
        "positive_weight A log pi where the reward is above threshold, else "
        "negative_weight sg(clip(r, 0, cap)) A log pi"
    )
    when: ClassVar[str] = "Very stale data and rewards of two kinds: good answers are learned however old they are."
    ratio_options: ClassVar[tuple[str, ...]] = ("cap",)

    type: Literal["topr"] = "topr"
    threshold: float = Field(0.0, description="Rewards above this are those of good answers")
    positive_weight: float = Field(1.0, ge=0, description="Weight of good answers")
    negative_weight: float = Field(1.0, ge=0, description="Weight of the others")
    cap: float = Field(1.0, ge=1, description="Largest ratio of the others, at least 1")

    @model_validator(mode="after")
    def _something_is_trained(self) -> ToprOptions:
        if self.positive_weight == 0 and self.negative_weight == 0:
            raise ValueError(
                "`algorithm.positive_weight = 0` and `algorithm.negative_weight = 0` train nothing: every loss is 0; "
                "set one of them above 0"
            )
        return self

    @property
    def corrects(self) -> bool:
        return super().corrects and self.negative_weight > 0

    def without_effect(self) -> dict[str, str]:
        found = super().without_effect()
        if self.negative_weight == 0:
            for name in ("anchor", "cap"):
                found[name] = (
                    f"`algorithm.{name} = {getattr(self, name)!r}` has no effect with `algorithm.negative_weight = 0`: "
                    "only answers that are not good have a ratio; leave it out, or set `negative_weight` above 0"
                )
        return found

    def idle_at_ratio_one(self) -> tuple[str, ...]:
        alike = self.positive_weight == self.negative_weight  # then only the ratio tells the two parts apart
        return (*super().idle_at_ratio_one(), *(("threshold",) if alike else ()))

    def loss(self, tokens: Tokens) -> Loss:
        import torch

        ratio = self.ratio(tokens).detach()
        positive = tokens.rewards > self.threshold
        truncated = self.negative_weight * ratio.clamp(max=self.cap)
        weights = torch.where(positive, torch.full_like(ratio, self.positive_weight), truncated)
        diagnostics = {
            "positive_fraction": positive.to(ratio.dtype),
            "clip_fraction_high": (~positive & (ratio > self.cap)).to(ratio.dtype),
        }
        return policy_gradient(tokens, weights), diagnostics
