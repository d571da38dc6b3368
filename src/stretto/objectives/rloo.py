"""RLOO: REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName
from stretto.objectives.weighting import WEIGHT_FORMULA, Level, WeightOptions


class RlooOptions(WeightOptions):
    """REINFORCE leave-one-out: a completion is one action, its baseline the mean reward of the others of its group."""

    formula: ClassVar[str] = WEIGHT_FORMULA
    when: ClassVar[str] = "Small groups and short completions: its baseline is unbiased for any size of group."

    type: Literal["rloo"] = "rloo"
    advantage: AdvantageName = Field("leave-one-out", description="As in every objective")
    level: Level = Field("sequence", description="Ratio of each token by itself, or of the whole completion")
    cap: float = Field(2.0, ge=1, description="Largest ratio, at least 1")
