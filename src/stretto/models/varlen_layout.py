"""The places of packed sequences in attention, some of which continue a prefix that others continue too.

The answers to one prompt begin with the same tokens. Those are computed once, as a sequence of their own: the *prefix*.
Each answer is a sequence that attends to the keys of its prefix and then to its own. So linear layers see every prompt
once, and attention sees each sequence whole. Nothing changes in the mathematics: under causality the states of a prefix
do not depend on what follows.

Keys and values are computed for the packed tokens [T] and copied [K]: a prefix for itself, and once for each sequence
that continues it (`varlen_copies.py`). A sequence continues at most one prefix, and a prefix continues none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MIN_LIMIT = 128  # flash attention treats a longest length of 1 as decoding
NO_COPY = -1


class VarlenLayout(NamedTuple):
    """The sequences of a micro-batch, as attention reads them.

    The number of sequences and the length of `copies` change from one micro-batch to the next; neither is ever 0 or 1,
    which compiled graphs would treat as cases of their own.
    """

    ends: Tensor  # [2, sequences + 1] int32: 0, then the end of each sequence among the tokens, and among the keys
    copies: Tensor  # int64: the parts of `Copies`, one after the other; two zeros if no prefix is shared
    sizes: Tensor  # [3] int64 on the host: a bound of the lengths, from a small set; K, 0 if no prefix is shared; the
    # most copies of one prefix

    def to(self, device: torch.device | str) -> VarlenLayout:
        """Returns the same layout, for tensors on `device`."""
        return self._replace(ends=self.ends.to(device), copies=self.copies.to(device))


def ragged_arange(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`0 .. n - 1` for each length `n`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def varlen_layout(lengths: NDArray[np.int64], prefixes: NDArray[np.int64] | None = None) -> VarlenLayout:
    """Returns the layout of sequences of these lengths, in this order.

    `prefixes[i]` is the sequence that sequence `i` continues, -1 if it is whole; None: all are. Lengths are those of a
    sequence's own tokens.
    """
    before = np.zeros_like(lengths) if prefixes is None else np.where(prefixes < 0, 0, lengths[prefixes])
    of_keys = lengths + before
    ends = np.zeros((2, len(lengths) + 1), dtype=np.int32)
    np.cumsum(lengths, out=ends[0, 1:])
    np.cumsum(of_keys, out=ends[1, 1:])
    limit = max(MIN_LIMIT, 1 << (int(of_keys.max()) - 1).bit_length())
    if prefixes is None or not before.any():
        return VarlenLayout(torch.from_numpy(ends), torch.zeros(2, dtype=torch.int64), torch.tensor([limit, 0, 0]))
    starts, key_starts = (each[:-1].astype(np.int64) for each in ends)
    within = ragged_arange(of_keys)
    owner = np.repeat(np.arange(len(lengths)), of_keys)
    in_prefix = within < before[owner]
    sources = np.where(in_prefix, starts[prefixes][owner], (starts - before)[owner]) + within
    places = np.repeat(key_starts + before, lengths) + ragged_arange(lengths)
    shared = np.unique(prefixes[prefixes >= 0])
    most = 1 + int(np.bincount(prefixes[prefixes >= 0]).max())
    table = np.full((len(shared), most), NO_COPY, dtype=np.int64)
    rows = np.full(len(places), NO_COPY, dtype=np.int64)
    for row, prefix in enumerate(shared.tolist()):
        copies = [key_starts[prefix], *key_starts[prefixes == prefix]]
        table[row, : len(copies)] = copies
        rows[starts[prefix] : starts[prefix] + lengths[prefix]] = row
    joined = np.concatenate([sources, places, rows, table.reshape(-1)])
    return VarlenLayout(torch.from_numpy(ends), torch.from_numpy(joined), torch.tensor([limit, len(sources), most]))


class Copies(NamedTuple):
    """The places of keys that are copies of packed tokens."""

    sources: Tensor  # [K]: the token that each key is a copy of
    places: Tensor  # [T]: the key of each token in its own sequence
    rows: Tensor  # [T]: the row of `table` of each token; `NO_COPY`: it is in no prefix
    table: Tensor  # [prefixes, most]: the first key of each copy of a prefix, its own first; filled up by `NO_COPY`

    @classmethod
    def of(cls, copies: Tensor, tokens: int, num_keys: int, most: int) -> Copies:
        """Divides the indices of a layout."""
        rest = len(copies) - num_keys - 2 * tokens
        sources, places, rows, table = copies.split_with_sizes([num_keys, tokens, tokens, rest])
        return cls(sources, places, rows, table.view(-1, most))
