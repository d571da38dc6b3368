"""HisPO: a ratio with two factors, one of which decides which tokens are trained on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, Tokens, bounded_exp, ratio, sequence_mean
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class HispoOptions(ClipOptions):
    """Hierarchical importance sampling: drops whole sequences, then single tokens, that have drifted too far."""

    formula: ClassVar[str] = (
        f"{CLIP_FORMULA}; r = r_dis r_stale, r_dis = pi_old / mu, r_stale = pi / pi_old; 0 unless "
        "|geomean(r_dis) - 1| < sequence_bound and |r_dis - 1| < token_bound"
    )
    when: ClassVar[str] = (
        "Engine and trainer differ by more than rounding, for example with mixtures of experts or low precision."
    )

    type: Literal["hispo"] = "hispo"
    anchor: Literal["behaviour"] = Field(
        "behaviour", description="The two factors together are always the ratio to the policy that sampled"
    )
    sequence_bound: float = Field(
        0.1, gt=0, description="Largest distance from 1 of the geometric mean of pi_old / mu over a sequence"
    )
    token_bound: float = Field(0.8, gt=0, description="Largest distance from 1 of pi_old / mu of a token")

    def loss(self, tokens: Tokens) -> Loss:
        logs = (tokens.proximal - tokens.behaviour).detach()
        near = (bounded_exp(sequence_mean(logs, tokens)) - 1).abs() < self.sequence_bound
        kept = near & ((bounded_exp(logs) - 1).abs() < self.token_bound)
        stale = ratio(tokens.logprobs, tokens.proximal)
        losses, diagnostics = self.clipped(bounded_exp(logs) * stale, tokens.advantages)
        diagnostics["masked_sequence_fraction"] = (~near).to(losses.dtype)
        diagnostics["masked_fraction"] = (~kept).to(losses.dtype)
        return losses.masked_fill(~kept, 0.0), diagnostics
