"""DAPO: the clipped surrogate with a wider clip above than below."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions


class DapoOptions(ClipOptions):
    """Decoupled clip and dynamic sampling: GRPO with a higher upper clip ("clip higher") and a mean over tokens."""

    formula: ClassVar[str] = CLIP_FORMULA
    when: ClassVar[str] = (
        "Long reasoning whose entropy collapses under GRPO: unlikely tokens may become more likely. Its penalty on "
        "overlong completions is `[algorithm.length]`, its dynamic sampling `rollout.filter`."
    )

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped above at 1 + clip_high")
