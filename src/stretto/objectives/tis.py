"""TIS: truncated importance sampling."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens, policy_gradient


class TisOptions(RatioOptions):
    """The policy gradient with an importance weight that is truncated from above."""

    formula: ClassVar[str] = "sg(clip(r, 0, cap)) A log pi"
    when: ClassVar[str] = "Stale data and nothing to tune: what has become unlikelier counts less, and nothing more."
    ratio_options: ClassVar[tuple[str, ...]] = ("cap",)

    type: Literal["tis"] = "tis"
    cap: float = Field(1.0, ge=1, description="Largest weight, at least 1")

    def loss(self, tokens: Tokens) -> Loss:
        ratio = self.ratio(tokens).detach()
        diagnostics = {"clip_fraction_high": (ratio > self.cap).to(ratio.dtype)}
        return policy_gradient(tokens, ratio.clamp(max=self.cap)), diagnostics
