"""The options of `[algorithm.length]`: how the length of a completion changes its reward. Torch-free.

`training/shaping.py` computes them, before advantages are made. What is reported as the reward stays the environment's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shaping(BaseModel):
    """A kind of shaping by length."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    formula: ClassVar[str]  # what is added to the reward of a completion of `n` tokens; shown in the documentation

    type: str
    weight: float = Field(1.0, gt=0, description="Factor of what is added to the reward")


class OverlongOptions(Shaping):
    """DAPO's soft punishment: a completion that comes near the longest one loses reward, more with every token."""

    formula: ClassVar[str] = "0 for n <= max_tokens - cache; then -(n - (max_tokens - cache)) / cache; at least -1"

    type: Literal["overlong"] = "overlong"
    max_tokens: int | None = Field(
        None, ge=1, description="Length at which the punishment is full; default: `rollout.max_tokens`"
    )
    cache: int = Field(ge=1, description="Tokens before `max_tokens` over which it grows")


class RelativeOptions(Shaping):
    """Kimi's length reward: linear in the length between a group's shortest completion and its longest."""

    formula: ClassVar[str] = (
        "lambda = 1/2 - (n - shortest) / (longest - shortest) for a right answer, min(0, lambda) for a wrong one; 0 "
        "where all of a group are of one length"
    )

    type: Literal["relative"] = "relative"
    threshold: float = Field(0.0, description="A reward above this is a right answer's")


LengthOptions = Annotated[OverlongOptions | RelativeOptions, Field(discriminator="type")]


def length_refusals(options: OverlongOptions | RelativeOptions, *, max_tokens: int, group: int) -> list[str]:
    """Why `[algorithm.length]` cannot act where completions have at most `max_tokens` and groups `group` members."""
    if isinstance(options, RelativeOptions):
        if group == 1:
            return [
                '`algorithm.length.type = "relative"` has no effect with `rollout.group = 1`: it compares the lengths '
                "of a group; raise the group, or leave it out"
            ]
        return []
    if reason := overlong_refusal(options, max_tokens=max_tokens):
        return [reason]
    full = options.max_tokens if options.max_tokens is not None else max_tokens
    if full - options.cache >= max_tokens:
        return [
            f"`algorithm.length.max_tokens = {full}` has no effect: it punishes completions of more than "
            f"{full - options.cache} tokens, and `rollout.max_tokens = {max_tokens}` ends them before; use less"
        ]
    return []


def overlong_refusal(options: OverlongOptions, *, max_tokens: int) -> str:
    """Why no completion would go unpunished where completions have at most `max_tokens`; empty where some do."""
    full = options.max_tokens if options.max_tokens is not None else max_tokens
    if options.cache < full:
        return ""
    return (
        f"`algorithm.length.cache = {options.cache}` leaves no length unpunished: the punishment grows over so many "
        f"tokens and is full at {full}, which is `algorithm.length.max_tokens` or else the `max_tokens` of the run; "
        "use less"
    )
