"""GSPO: one clipped ratio for each sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Average, Loss, Tokens, bounded_exp, sequence_mean
from stretto.objectives.clipping import ClipOptions


class GspoOptions(ClipOptions):
    """Group sequence policy optimization: the ratio of a sequence is the geometric mean over its tokens, clipped."""

    formula: ClassVar[str] = (
        "min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of log r); "
        "for A < 0 no lower than dual_clip A"
    )
    when: ClassVar[str] = "Mixtures of experts and long completions, whose single-token ratios are mostly noise."

    type: Literal["gspo"] = "gspo"
    average: Average = Field("sequence", description="As in every objective")
    clip_low: float = Field(
        0.03, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low; the paper uses 3e-4, for fresh data"
    )
    clip_high: float = Field(
        0.04, gt=0, description="The ratio is clipped above at 1 + clip_high; the paper uses 4e-4, for fresh data"
    )

    def loss(self, tokens: Tokens) -> Loss:
        logs = tokens.logprobs.detach() - tokens.anchor_logprobs(self.anchor)
        # The value is that of the sequence, the gradient each token's share of it. If the advantages of a sequence are
        # equal, the gradients sum to that of `s A`; if not, each token still has its own.
        own = (tokens.logprobs - tokens.logprobs.detach()).exp()
        return self.clipped(bounded_exp(sequence_mean(logs, tokens)) * own, tokens.advantages)
