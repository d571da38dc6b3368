"""The options of `[algorithm.turns]`: credit assignment by turn. Torch-free; see `training/turn_credit.py`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from stretto.options import Options


class TurnOptions(Options):
    """Credit assignment by turn, for episodes with several turns.

    Every token of a turn has the advantage of the rewards from that turn on, compared by the rule `advantage` between
    the members of a group that reached the turn. A critic (`gae`) sees the reward of a turn at the turn's end. If an
    episode has only one reward, it counts as earned at its last turn.
    """

    formula: ClassVar[str] = "A of turn j compares R_j = sum_(k >= j) gamma^(k - j) r_k, with r_k the reward of turn k"

    gamma: float = Field(
        1.0, gt=0, le=1, description="Discount of rewards, a turn; not with a critic, which has its own"
    )
