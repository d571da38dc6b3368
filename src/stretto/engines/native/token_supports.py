"""The supports of the rows' tokens: ragged lists in two tables that grow as tokens arrive, without a loop over rows."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.types import MAX_SUPPORT, Sampling, Supports

Number = TypeVar("Number", np.int32, np.float32)

NO_SUPPORTS = Supports(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))


def support_width(sampling: Sampling) -> int:
    """Returns the most tokens that a recorded support may have; 0 if none is recorded."""
    if not (sampling.truncates and sampling.supports):
        return 0
    return min(sampling.top_k or MAX_SUPPORT, MAX_SUPPORT)


def too_wide(supports: Supports | None) -> int:
    """Returns the size of the first support that was too large to be recorded; 0 if there is none."""
    if supports is None:
        return 0
    above = np.nonzero(supports.counts > MAX_SUPPORT)[0]
    return int(supports.counts[above[0]]) if len(above) else 0


class SupportTable:
    """Supports of up to `capacity` rows. Of a support above `MAX_SUPPORT`, only the size is stored."""

    def __init__(self, capacity: int) -> None:
        self._counts = np.zeros((capacity, 0), dtype=np.int32)
        self._tokens = np.zeros((capacity, 0), dtype=np.int32)
        self._made = np.zeros(capacity, dtype=np.int64)  # tokens that have a support here
        self._used = np.zeros(capacity, dtype=np.int64)  # of the row in `_tokens`

    def put(self, row: int, supports: Supports) -> None:
        """Starts a row with the supports that its trajectory has already."""
        made, used = len(supports.counts), len(supports.tokens)
        self._reserve(made, used)
        self._counts[row, :made], self._tokens[row, :used] = supports.counts, supports.tokens
        self._made[row], self._used[row] = made, used

    def record(self, rows: NDArray[np.int64], counts: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Records one draw of each of `rows`: sizes [n], and tokens [n, width], the first ones of each row."""
        if not len(rows):
            return
        made, used = self._made[rows], self._used[rows]
        sizes = np.where(counts > MAX_SUPPORT, 0, counts).astype(np.int64)
        self._reserve(int(made.max()) + 1, int((used + sizes).max()))
        self._counts[rows, made] = counts
        valid = np.arange(tokens.shape[1]) < sizes[:, None]
        owner, within = np.nonzero(valid)
        self._tokens[rows[owner], used[owner] + within] = tokens[valid]
        self._made[rows], self._used[rows] = made + 1, used + sizes

    def of(self, row: int) -> Supports:
        """Returns a copy of a row's supports."""
        return Supports(self._counts[row, : self._made[row]].copy(), self._tokens[row, : self._used[row]].copy())

    def move(self, target: NDArray[np.int64] | list[int], source: NDArray[np.int64] | list[int]) -> None:
        """Moves rows `source` to the places `target`."""
        for table in (self._counts, self._tokens, self._made, self._used):
            table[target] = table[source]

    def _reserve(self, made: int, used: int) -> None:
        self._counts, self._tokens = grown(self._counts, made), grown(self._tokens, used)


def grown(table: NDArray[Number], width: int) -> NDArray[Number]:
    """Returns the table, at least `width` wide, grown by doubling."""
    have = table.shape[1]
    return table if width <= have else np.pad(table, ((0, 0), (0, max(width, 2 * have) - have)))
