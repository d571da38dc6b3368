"""The options of `[algorithm.length]`: reward shaping by the length of a completion. Torch-free.

`training/reward_shaping.py` applies them, before advantages are computed. The reported reward is the environment's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.options import Options


class LengthShaping(Options):
    """The base of every kind of shaping by length."""

    formula: ClassVar[str]  # added to the reward of a completion of `n` tokens; shown in the documentation

    type: str
    weight: float = Field(1.0, gt=0, description="Factor of the change of the reward")


class OverlongOptions(LengthShaping):
    """DAPO's soft overlong penalty: grows linearly as a completion approaches the maximum length."""

    formula: ClassVar[str] = "0 for n <= max_tokens - cache; then -(n - (max_tokens - cache)) / cache; at least -1"

    type: Literal["overlong"] = "overlong"
    max_tokens: int | None = Field(None, ge=1, description="Length of the full penalty; default: `rollout.max_tokens`")
    cache: int = Field(ge=1, description="Tokens before `max_tokens` over which the penalty grows")


class RelativeOptions(LengthShaping):
    """Kimi's length reward: linear in the length between a group's shortest completion and its longest."""

    formula: ClassVar[str] = (
        "lambda = 1/2 - (n - shortest) / (longest - shortest) for a correct answer, min(0, lambda) for a wrong one; 0 "
        "if all completions of the group have one length"
    )

    type: Literal["relative"] = "relative"
    threshold: float = Field(0.0, description="A reward above this counts as a correct answer")


LengthOptions = Annotated[OverlongOptions | RelativeOptions, Field(discriminator="type")]


def length_refusals(options: OverlongOptions | RelativeOptions, *, max_tokens: int, group: int) -> list[str]:
    """The reasons why `[algorithm.length]` cannot act, for completions of `max_tokens` and groups of `group`."""
    if isinstance(options, RelativeOptions):
        if group == 1:
            return [
                '`algorithm.length.type = "relative"` has no effect with `rollout.group = 1`: it compares the lengths '
                "within a group; raise `rollout.group`, or leave it out"
            ]
        return []
    if reason := overlong_refusal(options, max_tokens=max_tokens):
        return [reason]
    full = options.max_tokens if options.max_tokens is not None else max_tokens
    if full - options.cache >= max_tokens:
        return [
            f"`algorithm.length.max_tokens = {full}` has no effect: it penalizes completions of more than "
            f"{full - options.cache} tokens, and `rollout.max_tokens = {max_tokens}` ends them before that; use less"
        ]
    return []


def overlong_refusal(options: OverlongOptions, *, max_tokens: int) -> str:
    """The reason why every completion would be penalized, for completions of `max_tokens`; empty if some would not."""
    full = options.max_tokens if options.max_tokens is not None else max_tokens
    if options.cache < full:
        return ""
    return (
        f"`algorithm.length.cache = {options.cache}` penalizes every length: the penalty grows over `cache` tokens and "
        f"is full at {full} (`algorithm.length.max_tokens`, by default the `max_tokens` of the run); use less"
    )
