"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName, Average
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class DrGrpoOptions(ClipOptions):
    """GRPO done right: no division by the group's standard deviation or by the length of a completion."""

    formula: ClassVar[str] = f"{CLIP_FORMULA}; summed over tokens, divided by average_tokens times the sequences"
    when: ClassVar[str] = (
        "Completions grow under GRPO without getting better: a long wrong answer is no longer penalized less."
    )

    type: Literal["dr-grpo"] = "dr-grpo"
    average: Average = Field("constant", description="As in every objective")
    advantage: AdvantageName = Field("group-mean", description="As in every objective")
