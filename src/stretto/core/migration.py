"""Whether a trajectory that changes instance takes its KV along, or is prefilled again where it goes.

Either gives the same tokens: this decides cost alone. The rates follow what was measured, and begin with guesses that
favour carrying, which is what the first measurement needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NEW_SHARE = 0.3  # of the last measurement of moves in the rate that follows them


@dataclass(frozen=True, slots=True)
class MoveRates:
    """What moving and prefilling cost between two instances, as far as it is known."""

    bytes_per_s: float = 1e9  # of KV, out of one instance and into another
    prefill_tokens_per_s: float = 5e3

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be above 0")

    def moved(self, num_bytes: int, seconds: float) -> MoveRates:
        """The rates after KV of that size took so long to move. What was too quick to measure changes nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return self
        return replace(self, bytes_per_s=(1 - NEW_SHARE) * self.bytes_per_s + NEW_SHARE * num_bytes / seconds)


def carries_kv(context_tokens: int, kv_bytes_per_token: int, rates: MoveRates) -> bool:
    """Whether to carry the KV of a context of so many tokens; a tie is carried, as it loads no other's decode step.

    An engine without portable KV has `kv_bytes_per_token` 0, and never carries any.
    """
    if context_tokens <= 0 or kv_bytes_per_token <= 0:
        return False
    return context_tokens * kv_bytes_per_token / rates.bytes_per_s <= context_tokens / rates.prefill_tokens_per_s
