"""GRPO: the clipped surrogate of PPO with advantages relative to the group."""

from __future__ import annotations

from typing import ClassVar, Literal

from stretto.objectives.clipping import ClipOptions


class GrpoOptions(ClipOptions):
    """Group-relative policy optimization: PPO's clipped ratio, with an advantage relative to the group."""

    formula: ClassVar[str] = "min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 no lower than dual_clip A"
    when: ClassVar[str] = "The default: a sound start for rewards that can be checked, at small staleness."

    type: Literal["grpo"] = "grpo"
