"""The places of packed sequences in attention, some of which continue a prefix that others continue too.

The answers to one prompt begin with the same tokens. Those are computed once, as a sequence of their own: the *prefix*.
Each answer is a sequence that attends to the keys of its prefix and then to its own. So linear layers see every prompt
once, and attention sees each sequence whole. Nothing changes in the mathematics: under causality the states of a prefix
do not depend on what follows.

Keys and values are computed for the packed tokens [T] and *expanded* [K]: one copy of a prefix for itself and one for
each sequence that continues it. Their gradients are *reduced* by a sum over the copies, rounded once and in a fixed
order. A sequence continues at most one prefix, and a prefix continues none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.models.float32_products import wide_type

MIN_LIMIT = 128  # flash attention treats a longest length of 1 as decoding
NO_COPY = -1


class VarlenLayout(NamedTuple):
    """The sequences of a micro-batch, as attention reads them.

    The number of sequences and the length of `copies` change from one micro-batch to the next; neither is ever 0 or 1,
    which compiled graphs would treat as cases of their own.
    """

    ends: Tensor  # [2, sequences + 1] int32: 0, then the end of each sequence among the tokens, and among the keys
    copies: Tensor  # int64: the indices that `expanded` and `reduced` read, one after the other; unused: two zeros
    sizes: Tensor  # [4] int64 on the host: a bound of the lengths, from a small set; K, 0 if no prefix is shared; the
    # tokens of all prefixes; the most sequences that continue one prefix

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
        return VarlenLayout(torch.from_numpy(ends), torch.zeros(2, dtype=torch.int64), torch.tensor([limit, 0, 0, 0]))
    starts, key_starts = (each[:-1].astype(np.int64) for each in ends)
    within = ragged_arange(of_keys)
    owner = np.repeat(np.arange(len(lengths)), of_keys)
    in_prefix = within < before[owner]
    sources = np.where(in_prefix, starts[prefixes][owner], (starts - before)[owner]) + within
    places = np.repeat(key_starts + before, lengths) + ragged_arange(lengths)
    shared = np.unique(prefixes[prefixes >= 0])
    most = int(np.bincount(prefixes[prefixes >= 0]).max())
    tokens = np.repeat(starts[shared], lengths[shared]) + ragged_arange(lengths[shared])
    first = np.full((len(shared), most), NO_COPY, dtype=np.int64)  # the first key of each copy of a prefix
    for row, prefix in enumerate(shared.tolist()):
        copies = key_starts[prefixes == prefix]
        first[row, : len(copies)] = copies
    first = np.repeat(first, lengths[shared], axis=0)
    table = np.where(first == NO_COPY, NO_COPY, first + ragged_arange(lengths[shared])[:, None])
    joined = np.concatenate([sources, places, tokens, table.reshape(-1)])
    sizes = torch.tensor([limit, len(sources), len(tokens), most])
    return VarlenLayout(torch.from_numpy(ends), torch.from_numpy(joined), sizes)


def expanded(rows: Tensor, copies: Tensor, sizes: Tensor) -> Tensor:
    """Returns the rows [T, ...] of packed tokens as the keys [K, ...] that sequences attend to."""
    num_keys = int(sizes[1])
    return rows.index_select(0, copies[:num_keys]) if num_keys else rows


def reduced(grads: Tensor, tokens: int, copies: Tensor, sizes: Tensor) -> Tensor:
    """Returns the gradients [T, ...] of packed tokens from those of the keys [K, ...]: sums over copies of a token."""
    _, num_keys, num_shared, most = sizes.tolist()
    if not num_keys:
        return grads
    _, places, shared, table = copies.split_with_sizes([num_keys, tokens, num_shared, num_shared * most])
    result = grads.index_select(0, places)
    others = grads.index_select(0, table.clamp(min=0)).to(wide_type(grads.dtype))
    others.masked_fill_((table == NO_COPY).view(-1, *[1] * (grads.dim() - 1)), 0.0)
    total = others.view(num_shared, most, *grads.shape[1:]).sum(1).add_(result.index_select(0, shared))
    return result.index_copy_(0, shared, total.to(grads.dtype))
