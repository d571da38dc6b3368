"""Whether a trajectory that changes instance takes its KV along, or is prefilled again where it goes.

Either gives the same tokens: this decides cost alone. The rates follow what was measured, and begin with guesses that
favour carrying, which is what the first measurement needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NEW_SHARE = 0.3  # of the last measurement in a rate that follows them


@dataclass(frozen=True, slots=True)
class MoveRates:
    """What moving and prefilling cost between two instances, as far as it is known."""

    bytes_per_s: float = 1e9  # of KV, out of one instance and into another
    prefill_tokens_per_s: float = 5e3
    move_s: float = 0.0  # of one move, however little it carries

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be above 0")
        if not self.move_s >= 0:
            raise ValueError(f"`move_s` is {self.move_s}; it must be at least 0")

    def moved(self, num_bytes: int, seconds: float) -> MoveRates:
        """The rates after KV of that size took so long to move. What was too quick to measure changes nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return self
        return replace(self, bytes_per_s=_follow(self.bytes_per_s, num_bytes / seconds))

    def prefilled(self, num_tokens: int, seconds: float) -> MoveRates:
        """The rates after so many tokens took so long to prefill."""
        if num_tokens <= 0 or seconds <= 0:
            return self
        return replace(self, prefill_tokens_per_s=_follow(self.prefill_tokens_per_s, num_tokens / seconds))


def carries_kv(context_tokens: int, kv_bytes_per_token: int, rates: MoveRates) -> bool:
    """Whether to carry the KV of a context of so many tokens; a tie is carried, as it loads no other's decode step.

    An engine without portable KV has `kv_bytes_per_token` 0, and never carries any.
    """
    if context_tokens <= 0 or kv_bytes_per_token <= 0:
        return False
    move_s = rates.move_s + context_tokens * kv_bytes_per_token / rates.bytes_per_s
    return move_s <= context_tokens / rates.prefill_tokens_per_s


def _follow(rate: float, measured: float) -> float:
    return (1 - NEW_SHARE) * rate + NEW_SHARE * measured
