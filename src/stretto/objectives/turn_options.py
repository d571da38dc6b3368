"""The options of `[algorithm.turns]`: credit by turn. Torch-free; `training/credit.py` computes it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class TurnOptions(BaseModel):
    """Credit by turn, for episodes with several.

    Every token of a turn has the advantage of what its trajectory earned from that turn on. That is compared by the
    rule `advantage` between those of a group that reached the turn. A critic (`gae`) gets what a turn earned at the end
    of that turn. An episode that gives one reward earned it at its last turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    formula: ClassVar[str] = "A of turn j compares R_j = sum_(k >= j) gamma^(k - j) r_k, with r_k the reward of turn k"

    gamma: float = Field(
        1.0, gt=0, le=1, description="What a reward one turn later is worth; a critic has one of its own"
    )
