"""The policy gradient weighted by a ratio that carries no gradient, which several objectives share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens, bounded_exp, policy_gradient, sequence_sum

Level = Literal["token", "sequence"]

WEIGHT_FORMULA = 'sg(min(r, cap)) A log pi; with level = "sequence" r is the product over the completion\'s tokens'


class WeightOptions(RatioOptions):
    """The policy gradient with an importance weight a token or a completion."""

    ratio_options: ClassVar[tuple[str, ...]] = ("level", "cap")

    level: Level = Field("token", description="Ratio of each token by itself, or of the whole completion")
    cap: float | None = Field(None, ge=1, description="Largest ratio, at least 1; left out: no bound")

    def loss(self, tokens: Tokens) -> Loss:
        logs = tokens.logprobs.detach() - tokens.anchored(self.anchor)
        weights = bounded_exp(sequence_sum(logs, tokens) if self.level == "sequence" else logs)
        diagnostics = {}
        if self.cap is not None:
            diagnostics["clip_fraction_high"] = (weights > self.cap).to(weights.dtype)
            weights = weights.clamp(max=self.cap)
        return policy_gradient(tokens, weights), diagnostics
