"""RLOO: REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName
from stretto.objectives.weighting import WEIGHT_FORMULA, Level, WeightOptions


class RlooOptions(WeightOptions):
    """REINFORCE leave-one-out: a completion is one action; its baseline is the mean reward of the rest of its group."""

    formula: ClassVar[str] = WEIGHT_FORMULA
    when: ClassVar[str] = "Small groups and short completions: its baseline is unbiased for every group size."

    type: Literal["rloo"] = "rloo"
    advantage: AdvantageName = Field("leave-one-out", description="As in every objective")
    level: Level = Field("sequence", description="Ratio of each token, or of the whole completion")
    cap: float = Field(2.0, ge=1, description="Upper bound of the ratio, at least 1")
