"""Causal attention over packed sequences, side by side without padding, for any Hugging Face causal LM.

The model is called with one row of `T` tokens, so its linear layers never see padding. The layout chooses between two
kinds of attention: flash attention over sequences of any length (`varlen_attention.py`; CUDA in half precision), or a
few buckets of equal length. In buckets, right padding needs no mask under causality: a real query never attends to a
later key, and the results of padded queries are discarded.

The layout is passed through the model's own keyword arguments, so any number of threads may run it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface

from stretto.errors import ModelError
from stretto.models.varlen_attention import causal_varlen
from stretto.models.varlen_layout import VarlenLayout, varlen_layout

PACKED_ATTENTION = "stretto_packed"
LAYOUT_ARGUMENT = "packed_layout"  # the keyword by which the model passes the layout to its attention

BUCKET_COST = 128  # one more bucket costs about as much time as this many tokens of padding
GRID_RATIO = 1.1  # bucket sizes are chosen among lengths at least this far apart, so that choosing stays cheap

_IGNORED = frozenset({"position_ids", "cache_position", "use_cache", "is_causal"})


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The places of the sequences of a micro-batch, and their padding in attention.

    `gather[i]` is the token at place `i` of the padded buckets, one bucket after the other; padding repeats token 0.
    `scatter[t]` is the place of token `t`: `gather[scatter[t]] == t`. Without buckets, attention is `causal_varlen` by
    `varlen`, where sequences may continue prefixes.
    """

    longest: int  # length of a sequence, with its prefix
    varlen: VarlenLayout
    buckets: tuple[tuple[int, int], ...]  # (sequences, padded length)
    gather: torch.Tensor  # [sum of sequences * padded length] int64
    scatter: torch.Tensor  # [T] int64
    routing: torch.Tensor | None = None  # [T, layers, k] int64: the experts that the tokens go to; None: as routed
    loads: Any = None  # `ExpertLoads` that counts the experts of the tokens; None: nobody counts
    filling: int = 0  # tokens at the end that belong to no sample

    def counts_of(self, place: int) -> Callable[[torch.Tensor], None] | None:
        """Returns what counts the experts [T, k] of a layer, the `place`-th that has some; None: nobody counts."""
        if self.loads is None:
            return None
        return lambda ids: self.loads.add(place, ids[: len(ids) - self.filling])

    def to(self, device: torch.device | str) -> PackedLayout:
        """Returns the same layout, for tensors on `device`."""
        gather, scatter = self.gather.to(device), self.scatter.to(device)
        return replace(self, varlen=self.varlen.to(device), gather=gather, scatter=scatter)


def bucket_lengths(lengths: NDArray[np.int64], *, bucket_cost: int = BUCKET_COST) -> list[int]:
    """Returns the padded lengths, ascending, that minimize padding plus `bucket_cost` for each of them.

    The last is the longest length. Each sequence goes to the smallest that holds it. The result is exact up to the grid
    of candidates, by dynamic programming.
    """
    candidates: list[int] = []
    for length in np.unique(lengths)[::-1].tolist():
        if not candidates or length * GRID_RATIO <= candidates[-1]:
            candidates.append(length)
    candidates.reverse()
    below = np.searchsorted(np.sort(lengths), candidates, side="right").tolist()  # sequences that fit each candidate
    best: list[tuple[int, int]] = []  # for each candidate as the largest so far: (cost, the next smaller one or -1)
    for upper, length in enumerate(candidates):
        options = [(below[upper] * length, -1)]
        options += [(best[lower][0] + (below[upper] - below[lower]) * length, lower) for lower in range(upper)]
        cost, lower = min(options)
        best.append((cost + bucket_cost, lower))
    chosen: list[int] = []
    at = len(candidates) - 1
    while at >= 0:
        chosen.append(candidates[at])
        at = best[at][1]
    return chosen[::-1]


def layout_of(
    lengths: NDArray[np.int64],
    device: torch.device | str = "cpu",
    *,
    flash: bool = False,
    prefixes: NDArray[np.int64] | None = None,
) -> PackedLayout:
    """Returns the layout of sequences of these lengths, in this order: for flash attention, or in buckets.

    `prefixes` are the sequences that others continue, as in `varlen_layout`. Buckets have none.
    """
    assert flash or prefixes is None
    varlen = varlen_layout(lengths, prefixes)
    buckets: list[tuple[int, int]] = []
    gather = scatter = np.empty(0, dtype=np.int64)
    if not flash:
        buckets, gather, scatter = _bucketed(lengths)
    return PackedLayout(
        longest=int(varlen.ends[1].diff().max()),
        varlen=varlen,
        buckets=tuple(buckets),
        gather=torch.from_numpy(gather),
        scatter=torch.from_numpy(scatter),
    ).to(device)


def _bucketed(lengths: NDArray[np.int64]) -> tuple[list[tuple[int, int]], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the buckets of a layout, its `gather` and its `scatter`."""
    sizes = bucket_lengths(lengths)
    offsets = np.cumsum(lengths) - lengths
    bucket_of = np.searchsorted(sizes, lengths)
    scatter = np.empty(int(lengths.sum()), dtype=np.int64)
    gather: list[NDArray[np.int64]] = []
    buckets: list[tuple[int, int]] = []
    base = 0
    for bucket, size in enumerate(sizes):
        members = np.flatnonzero(bucket_of == bucket)
        within = np.arange(size)
        real = within < lengths[members, None]  # [n, size]
        index = np.where(real, offsets[members, None] + within, 0)
        scatter[index[real]] = base + np.flatnonzero(real)
        gather.append(index.reshape(-1))
        buckets.append((len(members), size))
        base += index.size
    return buckets, np.concatenate(gather), scatter


class _Pad(torch.autograd.Function):
    """Copies rows [T, ...] to padded places. Its gradient reads the real places only: padding has none."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Copies padded places to rows [T, ...]."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        ctx.num_padded = padded.shape[0]
        return padded.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = grads[0].new_zeros((ctx.num_padded, *grads[0].shape[1:]))
        return result.index_copy_(0, ctx.saved_tensors[0], grads[0]), None


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, T, head size]
    key: torch.Tensor,  # [1, kv heads, T, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention of each sequence over itself, [1, T, heads, head size].

    Raises `ModelError` if the model asks for anything else.
    """
    name = type(module).__name__
    options = {**unused, "dropout": dropout or None, "attention_mask": attention_mask}
    refused = [
        option
        for option, given in options.items()
        if given is not None and given is not False and option not in _IGNORED
    ]
    if refused:
        raise ModelError(
            f"`{name}` asks its attention for `{'`, `'.join(refused)}`, which packed attention does not have"
        )
    causal = unused.get("is_causal")
    if causal is False or (causal is None and not getattr(module, "is_causal", True)):
        raise ModelError(f"`{name}` is not causal: a policy's attention must be")
    if packed_layout is None:
        raise ModelError(
            f"`{name}` does not hand `{LAYOUT_ARGUMENT}` on to its attention, so sequences cannot be packed"
        )
    if sliding_window is not None and sliding_window < packed_layout.longest:
        raise ModelError(
            f"`{name}` has a sliding window of {sliding_window} tokens and a sequence has {packed_layout.longest}: "
            "packed attention has no window, so keep prompt plus completion within it"
        )
    if not packed_layout.buckets:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return causal_varlen(q, k, v, *packed_layout.varlen, scale)[0].unsqueeze(0), None
    grouped = query.shape[1] != key.shape[1]
    padded = [
        _Pad.apply(states[0].transpose(0, 1), packed_layout.gather, packed_layout.scatter)  # type: ignore[no-untyped-call]
        for states in (query, key, value)
    ]
    sizes = [sequences * length for sequences, length in packed_layout.buckets]
    parts = []
    for bucket, *states in zip(packed_layout.buckets, *(p.split(sizes) for p in padded), strict=True):
        q, k, v = (part.view(*bucket, *part.shape[1:]).transpose(1, 2) for part in states)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    rows = _Unpad.apply(joined, packed_layout.scatter)  # type: ignore[no-untyped-call]
    return rows.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
