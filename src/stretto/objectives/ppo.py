"""PPO: the clipped surrogate with an advantage for each token, from a learned critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.clipping import ClipOptions
from stretto.objectives.critic_options import CriticOptions


class PpoOptions(ClipOptions):
    """Proximal policy optimization: the clipped ratio, with generalized advantages from a learned critic."""

    formula: ClassVar[str] = (
        "min(r A_t, clip(r, 1 - clip_low, 1 + clip_high) A_t), for A_t < 0 no lower than dual_clip A_t, with "
        "A_t = sum_k (gamma lam)^k (R_(t+k) + gamma V_(t+k+1) - V_(t+k)) and R the reward, at the last token"
    )
    when: ClassVar[str] = "Groups are small, or credit within a long completion matters enough to train a critic."
    uses_critic: ClassVar[bool] = True

    type: Literal["ppo"] = "ppo"
    advantage: Literal["gae"] = Field("gae", description="From the critic, one for each token")
    critic: CriticOptions = Field(CriticOptions(), description="How the critic is trained and used")
