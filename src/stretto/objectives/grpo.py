"""GRPO: the clipped surrogate of PPO with advantages relative to the group."""

from __future__ import annotations

from typing import ClassVar, Literal

from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class GrpoOptions(ClipOptions):
    """Group-relative policy optimization: PPO's clipped ratio, with an advantage relative to the group."""

    formula: ClassVar[str] = CLIP_FORMULA
    when: ClassVar[str] = "The default: a good start for verifiable rewards at small staleness."

    type: Literal["grpo"] = "grpo"
