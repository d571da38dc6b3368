"""The options of the correction weight `w = pi_n / mu` and of its two factors. Torch-free.
`training/correction.py` computes them.

`w` is the probability of a token under the policy at the start of the update, divided by that under the policy that
sampled it. It multiplies the objective's loss and carries no gradient. It corrects for what a ratio to the proximal
policy leaves out: the age of a trajectory, and the numerical difference between engine and trainer. The two causes can
be told apart, because the trainer can compute the version that sampled: `w = (pi_w / mu) (pi_n / pi_w)`.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stretto.options import Options

MAX_LOG_WEIGHT = 20.0  # a weight beyond exp(20) is meaningless as an importance weight


class CorrectionOptions(Options):
    """Weights the loss of each token by `w`: the policy before the update over the policy that sampled it."""

    table: ClassVar[str] = "algorithm.correction"

    level: Literal["token", "segment", "turn", "geometric", "sequence"] = Field(
        "token",
        description="`token`: one `w` a token. `segment`: the product over segments of `segment_tokens`. `turn`: the "
        "product over each turn. `geometric`: the geometric mean over the sequence. `sequence`: the product over the "
        "sequence",
    )
    mode: Literal["cap", "filter"] = Field(
        "cap",
        description="`cap`: multiply the loss by `w` clipped to [low, high]. `filter`: drop the tokens whose `w` is "
        "outside of [low, high], and leave the others unweighted",
    )
    low: float = Field(
        0.0, ge=0, le=1, description="Lower bound of `w`; at most 1, so that on-policy data is unchanged"
    )
    high: float = Field(2.0, ge=1, description="Upper bound of `w`; at least 1, so that on-policy data is unchanged")
    segment_tokens: int | None = Field(None, ge=1, description='Tokens of a segment; only for `level = "segment"`')

    @model_validator(mode="after")
    def _segments_have_a_length(self) -> CorrectionOptions:
        if self.level == "segment" and self.segment_tokens is None:
            raise ValueError(
                f'`{self.table}.segment_tokens` is missing: `level = "segment"` needs the number of tokens in a '
                "segment; set it, for example `segment_tokens = 64`"
            )
        if self.level != "segment" and self.segment_tokens is not None:
            raise ValueError(
                f"`{self.table}.segment_tokens = {self.segment_tokens}` has no effect with "
                f'`level = "{self.level}"`; choose `level = "segment"`, or leave it out'
            )
        if self.low == self.high:
            raise ValueError(
                f"`{self.table}.low = {self.low}` and `high = {self.high}` cap every weight to 1 and filter "
                "every token: they correct nothing; set `low` below 1 or `high` above 1"
            )
        if self.mode == "filter" and self.low <= math.exp(-MAX_LOG_WEIGHT) and self.high >= math.exp(MAX_LOG_WEIGHT):
            raise ValueError(
                f"`{self.table}.low = {self.low}` and `high = {self.high}` filter nothing: weights are clamped "
                f"to exp(-{MAX_LOG_WEIGHT:g}) to exp({MAX_LOG_WEIGHT:g}), so they correct nothing; set `high` lower, "
                'for example to 2, or choose `mode = "cap"`'
            )
        return self


class DiscrepancyOptions(CorrectionOptions):
    """As `[algorithm.correction]`, for the factor `pi_w / mu` alone: trainer over engine, under the same version."""

    table: ClassVar[str] = "algorithm.discrepancy_correction"


class StalenessOptions(CorrectionOptions):
    """As `[algorithm.correction]`, for the factor `pi_n / pi_w` alone: the policy before the update over the version
    that sampled, both computed by the trainer."""

    table: ClassVar[str] = "algorithm.staleness_correction"
