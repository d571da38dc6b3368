"""TOPR: importance weights for what was wrong, none for what was right; with weights on the two parts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

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
