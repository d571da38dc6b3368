"""The options of the correction weight `w = exp(proximal - behaviour)`. Torch-free; see `training/correction.py`.

`w` says how much likelier a token is under the policy at the start of the update than under the policy that sampled it.
It multiplies the objective's loss and carries no gradient, so it corrects for what an anchor on the proximal policy
leaves out: how old a trajectory is, and how differently engine and trainer compute.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LOG_WEIGHT = 20.0  # as of a ratio: what lies beyond exp(20) is no importance weight any more


class CorrectionOptions(BaseModel):
    """How the loss of each token is weighted by `w`, the policy before the update over the one that sampled it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    level: Literal["token", "segment", "geometric", "sequence"] = Field(
        "token",
        description="One `w` a token; the product over a piece of `segment_tokens`; the geometric mean over a "
        "sequence; the product over a sequence",
    )
    mode: Literal["cap", "filter"] = Field(
        "cap",
        description="`cap`: the loss is multiplied by `w`, clipped to [low, high]. `filter`: tokens whose `w` lies "
        "outside of it have no loss, the others are left as they are",
    )
    low: float = Field(0.0, ge=0, le=1, description="Smallest `w`; at most 1, so that what is on policy is untouched")
    high: float = Field(2.0, ge=1, description="Largest `w`; at least 1, so that what is on policy is untouched")
    segment_tokens: int | None = Field(None, ge=1, description='Tokens of a piece; only for `level = "segment"`')

    @model_validator(mode="after")
    def _segments_have_a_length(self) -> CorrectionOptions:
        if self.level == "segment" and self.segment_tokens is None:
            raise ValueError(
                '`algorithm.correction.segment_tokens` is missing: `level = "segment"` cuts a sequence into pieces of '
                "so many tokens; set it, such as `segment_tokens = 64`"
            )
        if self.level != "segment" and self.segment_tokens is not None:
            raise ValueError(
                f"`algorithm.correction.segment_tokens = {self.segment_tokens}` has no effect with "
                f'`level = "{self.level}"`; choose `level = "segment"`, or leave it out'
            )
        if self.low == self.high:
            raise ValueError(
                f"`algorithm.correction.low = {self.low}` and `high = {self.high}` leave every weight at 1, or let "
                "nothing pass as a filter: they correct nothing; set `low` below 1 or `high` above 1"
            )
        if self.mode == "filter" and self.low <= math.exp(-MAX_LOG_WEIGHT) and self.high >= math.exp(MAX_LOG_WEIGHT):
            raise ValueError(
                f"`algorithm.correction.low = {self.low}` and `high = {self.high}` let everything pass as a filter: a "
                f"weight is held between exp(-{MAX_LOG_WEIGHT:g}) and exp({MAX_LOG_WEIGHT:g}), so they correct "
                'nothing; set `high` lower, such as 2, or choose `mode = "cap"`'
            )
        return self
