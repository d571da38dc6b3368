"""REINFORCE++: PPO's clipped surrogate without a critic, with advantages whitened over the whole batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import AdvantageName
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class ReinforcePlusPlusOptions(ClipOptions):
    """PPO's clipped ratio, with rewards whitened over the batch instead of a critic or a group baseline."""

    formula: ClassVar[str] = CLIP_FORMULA
    when: ClassVar[str] = (
        "Groups of one, or prompts of similar difficulty. Its divergence penalty is `[algorithm.kl]` with "
        '`place = "reward"` and `estimator = "k1"`.'
    )

    type: Literal["reinforce-plus-plus"] = "reinforce-plus-plus"
    advantage: AdvantageName = Field("whiten", description="As in every objective")
