"""Arrays as the journal stores them: little-endian bytes (`schema.py` says of which type)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.store.routing_files import stamp
from stretto.types import Completion


def blob(values: Sequence[float] | NDArray[Any], kind: str) -> bytes:
    """Returns values as little-endian bytes of `kind` (`<i4`, `<f4`, `<f8`), as the journal stores them."""
    return np.ascontiguousarray(values, dtype=kind).tobytes()


def sampled_values(values: NDArray[Any], turns: bytes | None) -> NDArray[Any]:
    """Returns the values of the tokens that were sampled; `turns` is the column of the journal."""
    if turns is None:
        return values
    spans = np.frombuffer(turns, "<i4").reshape(-1, 2).tolist()
    return np.concatenate([values[start:end] for start, end in spans])


@dataclass(frozen=True, slots=True)
class CompletionBlobs:
    """The arrays of a completion as the journal stores them."""

    tokens: bytes
    logprobs: bytes
    token_versions: bytes | None
    supports: bytes | None
    turns: bytes | None
    routing: bytes | None = None  # the stamp of its record

    @classmethod
    def of(cls, made: Completion) -> CompletionBlobs:
        versions, supports, turns = made.token_versions, made.supports, made.turns
        return cls(
            tokens=blob(made.tokens, "<i4"),
            logprobs=blob(made.logprobs, "<f4"),
            token_versions=None if versions is None else blob(versions, "<i4"),
            supports=None if supports is None else blob(supports.counts, "<i4") + blob(supports.tokens, "<i4"),
            turns=None if turns is None else blob(turns, "<i4"),
            routing=None if made.routing is None else stamp(made.routing),
        )
