"""CISPO: clips the importance weight instead of the objective."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens, policy_gradient


class CispoOptions(RatioOptions):
    """Clipped importance sampling: every token keeps its gradient, with a clipped weight that carries none."""

    formula: ClassVar[str] = "sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi"
    when: ClassVar[str] = "Stale data and long reasoning: rare but decisive tokens always keep a gradient."
    ratio_options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "mask")
    zero_without_advantage: ClassVar[bool] = True

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(
        1.0, gt=0, le=1, description="The weight is clipped below at 1 - clip_low; 1: no lower bound"
    )
    clip_high: float = Field(4.0, gt=0, description="The weight is clipped above at 1 + clip_high")
    mask: bool = Field(False, description="Drop the tokens that PPO would clip at the same bounds")

    def loss(self, tokens: Tokens) -> Loss:
        ratio = self.ratio(tokens).detach()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        below, above = ratio < low, ratio > high
        weights = ratio.clamp(low, high)
        diagnostics = {"clip_fraction_low": below.to(ratio.dtype), "clip_fraction_high": above.to(ratio.dtype)}
        if self.mask:
            masked = (below & (tokens.advantages < 0)) | (above & (tokens.advantages > 0))
            weights = weights.masked_fill(masked, 0.0)
            diagnostics["masked_fraction"] = masked.to(ratio.dtype)
        return policy_gradient(tokens, weights), diagnostics
