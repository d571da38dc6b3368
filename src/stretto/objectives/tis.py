"""TIS: truncated importance sampling."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens, policy_gradient


class TisOptions(RatioOptions):
    """The policy gradient with an importance weight truncated from above."""

    formula: ClassVar[str] = "sg(clip(r, 0, cap)) A log pi"
    when: ClassVar[str] = (
        "Stale data and nothing to tune: tokens that became less likely count less, and none counts more."
    )
    ratio_options: ClassVar[tuple[str, ...]] = ("cap",)
    zero_without_advantage: ClassVar[bool] = True

    type: Literal["tis"] = "tis"
    cap: float = Field(1.0, ge=1, description="Upper bound of the weight, at least 1")

    def loss(self, tokens: Tokens) -> Loss:
        ratio = self.ratio(tokens).detach()
        diagnostics = {"clip_fraction_high": (ratio > self.cap).to(ratio.dtype)}
        return policy_gradient(tokens, ratio.clamp(max=self.cap)), diagnostics
