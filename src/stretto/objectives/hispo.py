"""HisPO: a ratio in two factors, one of which decides what is trained on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, Tokens, bounded_exp, ratio, sequence_mean
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class HispoOptions(ClipOptions):
    """Hierarchical importance sampling: whole sequences, then single tokens that have drifted too far are left out."""

    formula: ClassVar[str] = (
        f"{CLIP_FORMULA}; r = r_dis r_stale, r_dis = pi_old / mu, r_stale = pi / pi_old; 0 unless "
        "|geomean(r_dis) - 1| < sequence_bound and |r_dis - 1| < token_bound"
    )
    when: ClassVar[str] = (
        "Engine and trainer differ by more than rounding, as with mixtures of experts or low precision."
    )

    type: Literal["hispo"] = "hispo"
    anchor: Literal["behaviour"] = Field(
        "behaviour", description="The two factors together are always a ratio against the policy that sampled"
    )
    sequence_bound: float = Field(
        0.1, gt=0, description="How far the geometric mean of pi_old / mu over a sequence may be from 1"
    )
    token_bound: float = Field(0.8, gt=0, description="How far pi_old / mu of a token may be from 1")

    def loss(self, tokens: Tokens) -> Loss:
        logs = (tokens.proximal - tokens.behaviour).detach()
        near = (bounded_exp(sequence_mean(logs, tokens)) - 1).abs() < self.sequence_bound
        kept = near & ((bounded_exp(logs) - 1).abs() < self.token_bound)
        stale = ratio(tokens.logprobs, tokens.proximal)
        losses, diagnostics = self.clipped(bounded_exp(logs) * stale, tokens.advantages)
        diagnostics["masked_sequence_fraction"] = (~near).to(losses.dtype)
        diagnostics["masked_fraction"] = (~kept).to(losses.dtype)
        return losses.masked_fill(~kept, 0.0), diagnostics
