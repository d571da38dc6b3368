"""The policy gradient weighted by a detached ratio, which several objectives share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens, bounded_exp, policy_gradient, sequence_sum

Level = Literal["token", "sequence"]

WEIGHT_FORMULA = 'sg(min(r, cap)) A log pi; with level = "sequence" r is the product over the completion\'s tokens'


class WeightOptions(RatioOptions):
    """The policy gradient with an importance weight for each token or completion."""

    ratio_options: ClassVar[tuple[str, ...]] = ("level", "cap")
    zero_without_advantage: ClassVar[bool] = True

    level: Level = Field("token", description="Ratio of each token, or of the whole completion")
    cap: float | None = Field(None, ge=1, description="Upper bound of the ratio, at least 1; default: no bound")

    def loss(self, tokens: Tokens) -> Loss:
        logs = tokens.logprobs.detach() - tokens.anchor_logprobs(self.anchor)
        weights = bounded_exp(sequence_sum(logs, tokens) if self.level == "sequence" else logs)
        diagnostics = {}
        if self.cap is not None:
            diagnostics["clip_fraction_high"] = (weights > self.cap).to(weights.dtype)
            weights = weights.clamp(max=self.cap)
        return policy_gradient(tokens, weights), diagnostics
