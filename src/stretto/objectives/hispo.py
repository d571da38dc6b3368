"""HisPO: the discrepancy between trainer and engine decides which tokens are trained on, their staleness is clipped."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Average, Loss, Tokens, bounded_exp, sequence_mean
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class HispoOptions(ClipOptions):
    """Hierarchical importance sampling: drops whole sequences, then single tokens, that the trainer cannot reproduce.

    A token that is stale but reproduced exactly is never dropped: its ratio to the version that sampled is clipped.
    """

    formula: ClassVar[str] = (
        f"sg(r_dis) times {CLIP_FORMULA}; r = pi / pi_w, r_dis = pi_w / mu; 0 unless |geomean(r_dis) - 1| < "
        "sequence_bound and |r_dis - 1| < token_bound; summed over tokens, divided by average_tokens times the "
        "sequences"
    )
    when: ClassVar[str] = (
        "Engine and trainer differ by more than rounding, for example with mixtures of experts or low precision."
    )

    type: Literal["hispo"] = "hispo"
    average: Average = Field("constant", description="As in every objective")
    anchor: Literal["sampled"] = Field(
        "sampled", description="The ratio is always to the version that sampled, as the trainer computes it"
    )
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped above at 1 + clip_high")
    dual_clip: float = Field(3.0, gt=1, description="Upper bound of the ratio for negative advantages (dual-clip PPO)")
    sequence_bound: float = Field(
        0.1, gt=0, description="Largest distance from 1 of the geometric mean of pi_w / mu over a sequence"
    )
    token_bound: float = Field(0.8, gt=0, description="Largest distance from 1 of pi_w / mu of a token")

    @property
    def corrects_discrepancy(self) -> bool:
        return True

    def loss(self, tokens: Tokens) -> Loss:
        logs = (tokens.scored - tokens.behaviour).detach()
        near = (bounded_exp(sequence_mean(logs, tokens)) - 1).abs() < self.sequence_bound
        kept = near & ((bounded_exp(logs) - 1).abs() < self.token_bound)
        losses, diagnostics = super().loss(tokens)
        diagnostics["masked_sequence_fraction"] = (~near).to(losses.dtype)
        diagnostics["masked_fraction"] = (~kept).to(losses.dtype)
        return (bounded_exp(logs) * losses).masked_fill(~kept, 0.0), diagnostics
