"""Kimi 1.5: the policy gradient with a quadratic penalty on the distance from the anchor."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName, Loss, RatioOptions, Tokens, policy_gradient


class KimiOptions(RatioOptions):
    """Policy mirror descent: no importance weight, but a penalty on the squared log-ratio."""

    formula: ClassVar[str] = "A log pi - (tau / 2) (log pi - log anchor)^2"
    when: ClassVar[str] = "Stale data without importance weights: the pull towards the anchor grows with the distance."
    ratio_options: ClassVar[tuple[str, ...]] = ("tau",)

    type: Literal["kimi"] = "kimi"
    advantage: AdvantageName = Field("group-mean", description="As in every objective")
    tau: float = Field(0.1, gt=0, description="Strength of the penalty")

    @property
    def corrects_off_policy(self) -> bool:
        return False

    def loss(self, tokens: Tokens) -> Loss:
        distances = tokens.logprobs - tokens.anchor_logprobs(self.anchor)
        penalty = 0.5 * self.tau * distances.square()
        return policy_gradient(tokens) + penalty, {"pull": penalty.detach()}
