"""DORA's objective: triplet clipping of the staleness ratio, with a truncated weight of the trainer over the engine."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Anchor, Average, Loss, Tokens
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions
from stretto.objectives.decoupled_ppo import truncated_weight


class DoraOptions(ClipOptions):
    """Three bounds on the ratio to the version that sampled, a truncated weight, and a constant divisor.

    With the default anchor the ratio `pi / pi_w` is the staleness of a token, and the weight `pi_w / mu` is the
    discrepancy between trainer and engine. With `anchor = "proximal"` the weight is `pi_n / mu`, which truncates
    staleness too. With `anchor = "behaviour"` the ratio contains the weight, so no other weight is applied.
    """

    formula: ClassVar[str] = (
        f"sg(min(r_dis, weight_cap)) times {CLIP_FORMULA}; r = pi / pi_w, r_dis = pi_w / mu; "
        "summed over tokens, divided by average_tokens times the sequences"
    )
    when: ClassVar[str] = (
        "Production runs with several versions at once and long tails; engine and trainer differ slightly."
    )

    type: Literal["dora"] = "dora"
    average: Average = Field("constant", description="As in every objective")
    anchor: Anchor = Field(
        "sampled",
        description="Denominator of the ratio. `sampled`: the version that sampled the token, as the trainer computes "
        "it, with a weight of that over the engine's. `proximal`: the policy at the start of the update, with a weight "
        "of that over the engine's. `behaviour`: the version that sampled, as the engine computed it",
    )
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped above at 1 + clip_high")
    dual_clip: float = Field(3.0, gt=1, description="Upper bound of the ratio for negative advantages (dual-clip PPO)")
    weight_cap: float = Field(2.0, ge=1, description="Upper bound of the weight, at least 1")

    @property
    def corrects_off_policy(self) -> bool:
        return True

    @property
    def corrects_discrepancy(self) -> bool:
        return True

    def without_effect(self) -> dict[str, str]:
        found = super().without_effect()
        if self.anchor == "behaviour":
            found["weight_cap"] = (
                f'`algorithm.weight_cap = {self.weight_cap}` has no effect with `algorithm.anchor = "behaviour"`: the '
                'ratio contains the weight; leave it out, or choose "sampled"'
            )
        return found

    def loss(self, tokens: Tokens) -> Loss:
        losses, diagnostics = super().loss(tokens)
        if self.anchor == "behaviour":
            return losses, diagnostics
        weights, capped = truncated_weight(tokens.anchor_logprobs(self.anchor), tokens, self.weight_cap)
        return weights * losses, {**diagnostics, **capped}
