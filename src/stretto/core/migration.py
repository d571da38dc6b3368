"""Decides whether a trajectory that moves carries its KV along or is prefilled again on the other instance.

Both give the same tokens; only the cost differs. The rates follow measurements. They begin with guesses that favour
carrying, because the first measurement needs a carried trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NEW_SHARE = 0.3  # the weight of the last measurement in the average


@dataclass(frozen=True, slots=True)
class MoveRates:
    """The speed of carrying KV and of prefilling, as far as they are known."""

    bytes_per_s: float = 1e9  # of KV, from one instance to another
    prefill_tokens_per_s: float = 5e3

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be above 0")

    def moved(self, num_bytes: int, seconds: float) -> MoveRates:
        """Returns the rates after KV of that size took so long to move. A time of 0 changes nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return self
        return replace(self, bytes_per_s=(1 - NEW_SHARE) * self.bytes_per_s + NEW_SHARE * num_bytes / seconds)


def carries_kv(context_tokens: int, kv_bytes_per_token: int, rates: MoveRates) -> bool:
    """Returns True if the KV of a context of so many tokens is carried. On a tie it is: that delays no decode step.

    An engine without portable KV has `kv_bytes_per_token` 0, and never carries any.
    """
    if context_tokens <= 0 or kv_bytes_per_token <= 0:
        return False
    return context_tokens * kv_bytes_per_token / rates.bytes_per_s <= context_tokens / rates.prefill_tokens_per_s
