"""GSPO: one clipped ratio a sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Average, Loss, Tokens, bounded_exp, sequence_mean
from stretto.objectives.clipping import ClipOptions


class GspoOptions(ClipOptions):
    """Group sequence policy optimization: the ratio is the geometric mean over a sequence, clipped as one."""

    formula: ClassVar[str] = (
        "min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of log r); "
        "for A < 0 no lower than dual_clip A"
    )
    when: ClassVar[str] = "Mixtures of experts and long completions, where ratios of single tokens are mostly noise."

    type: Literal["gspo"] = "gspo"
    average: Average = Field("sequence", description="How the losses of tokens become one, as in every objective")
    clip_low: float = Field(
        0.03, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low; for fresh data 3e-4 is published"
    )
    clip_high: float = Field(
        0.04, gt=0, description="The ratio is clipped above at 1 + clip_high; for fresh data 4e-4 is published"
    )

    def loss(self, tokens: Tokens) -> Loss:
        logs = tokens.logprobs.detach() - tokens.anchored(self.anchor)
        # The value is the sequence's, the gradient each token's own share of it: where the advantages of a sequence are
        # equal, their sum is the gradient of `s A`; where they are not, each token still has its own.
        own = (tokens.logprobs - tokens.logprobs.detach()).exp()
        return self.clipped(bounded_exp(sequence_mean(logs, tokens)) * own, tokens.advantages)
