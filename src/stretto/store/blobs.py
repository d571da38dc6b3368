"""Values as the journal stores them: texts, JSON, arrays as little-endian bytes (`schema.py` says of which type)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.store.routing_files import stamp
from stretto.types import Completion, RewardPart


def storable(text: str) -> str:
    """Returns `text` with lone surrogates replaced, which SQLite cannot store as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def json_or_null(values: Mapping[str, Any] | None) -> str | None:
    """Returns the JSON of a mapping, or None for a NULL."""
    return None if values is None else json.dumps(dict(values))


def blob(values: Sequence[float] | NDArray[Any], kind: str) -> bytes:
    """Returns values as little-endian bytes of `kind` (`<i4`, `<f4`, `<f8`), as the journal stores them."""
    return np.ascontiguousarray(values, dtype=kind).tobytes()


def sampled_values(values: NDArray[Any], turns: bytes | None) -> NDArray[Any]:
    """Returns the values of the tokens that were sampled; `turns` is the column of the journal."""
    if turns is None:
        return values
    spans = np.frombuffer(turns, "<i4").reshape(-1, 2).tolist()
    return np.concatenate([values[start:end] for start, end in spans])


def parts_text(parts: Sequence[RewardPart] | None) -> str | None:
    """Returns the parts of a reward as JSON, as the journal stores them."""
    if parts is None:
        return None
    # SQLite has no -0.0 in `reward`, and what is equal has one text.
    return json.dumps([[name, weight + 0.0, None if value is None else value + 0.0] for name, weight, value in parts])


def read_parts(text: object) -> tuple[RewardPart, ...] | None:
    """Returns what `parts_text` was given. Raises `ValueError` or `TypeError` for anything else."""
    if text is None:
        return None
    found = tuple(RewardPart(*each) for each in json.loads(text))  # type: ignore[arg-type]
    for name, weight, value in found:
        if not isinstance(name, str) or not isinstance(weight, float) or not isinstance(value, float | None):
            raise ValueError(f"a part of its reward is {(name, weight, value)!r}")
    return found


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
