"""REINFORCE with importance weights."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName
from stretto.objectives.weighting import WEIGHT_FORMULA, WeightOptions


class ReinforceOptions(WeightOptions):
    """The policy gradient with an importance weight for each token."""

    formula: ClassVar[str] = WEIGHT_FORMULA
    when: ClassVar[str] = "Little staleness and nothing to tune: no clip, and unbiased except for `cap`."

    type: Literal["reinforce"] = "reinforce"
    advantage: AdvantageName = Field("group-mean", description="As in every objective")
