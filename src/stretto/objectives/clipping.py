"""The clipped surrogate objective of PPO, which several objectives share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stretto.objectives.base import Loss, RatioOptions, Tokens

if TYPE_CHECKING:
    from torch import Tensor

CLIP_FORMULA = "min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 no lower than dual_clip A"


class ClipOptions(RatioOptions):
    """A ratio clipped on both sides, with an optional further bound for negative advantages."""

    ratio_options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    zero_without_advantage: ClassVar[bool] = True

    clip_low: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="The ratio is clipped above at 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="Upper bound of the ratio for negative advantages (dual-clip PPO)"
    )

    def loss(self, tokens: Tokens) -> Loss:
        return self.clipped(self.ratio(tokens), tokens.advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Loss:
        """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, for `A < 0` no higher than `-dual_clip A`."""
        import torch

        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        with torch.no_grad():
            diagnostics = {
                "clip_fraction_low": ((ratio < low) & (advantages < 0)).to(loss.dtype),
                "clip_fraction_high": ((ratio > high) & (advantages > 0)).to(loss.dtype),
            }
        if self.dual_clip is not None:
            negative = advantages < 0
            loss = torch.where(negative, torch.minimum(loss, -self.dual_clip * advantages), loss)
            with torch.no_grad():
                diagnostics["clip_fraction_dual"] = (negative & (ratio > self.dual_clip)).to(loss.dtype)
        return loss, diagnostics
