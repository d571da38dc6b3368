"""The ranks of adapters that vLLM makes room for. Does not import vLLM."""

from __future__ import annotations

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def slot_rank(rank: int) -> int:
    """Returns the rank that vLLM's slots have for adapters of `rank`: the next that it makes room for."""
    return next(each for each in RANKS if each >= rank)
