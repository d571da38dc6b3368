"""Log-probabilities over a part of the vocabulary: `logit_kernels` for tokens drawn by top-p, top-k or min-p.

Such a token was drawn from the softmax over its support, the tokens that were left to draw from. The trainer's
log-probability is therefore `logit - logsumexp(logits of the support)`; with any other normalizer the ratio to the
engine's would be wrong. The logits of the supports are gathered from a chunk into a block as wide as the widest
support. The derivative is scattered back to where they came from, and is zero everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.training.logit_kernels import LogitScale, Reduced
from stretto.types import Supports

# Pads a block, after scaling: its probability is exactly 0, and 0 times its square is finite.
PADDING = -1e15


@dataclass(frozen=True, slots=True)
class PackedSupports:
    """The supports of the `C` targets of a micro-batch."""

    sizes: NDArray[np.int64]  # [C], on the host, so that chunks are taken without waiting for the device
    counts: torch.Tensor  # [C] int64, the same
    tokens: torch.Tensor  # [S] int64, target after target
    hits: torch.Tensor  # [C] int64: the index of each target in its support

    def block(self, start: int, end: int, vocabulary: int) -> Block:
        """The positions of the supports of targets `start .. end - 1` in the logits."""
        sizes = self.sizes[start:end]
        total, offset = int(sizes.sum()), int(self.sizes[:start].sum())
        width, counts = int(sizes.max(initial=1)), self.counts[start:end]
        owner = torch.repeat_interleave(counts, output_size=total)
        within = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[owner]
        flat = owner * vocabulary + self.tokens[offset : offset + total]
        return Block(flat, owner * width + within, width, self.hits[start:end])


class Block(NamedTuple):
    """The supports of one chunk of targets, `S` tokens in all."""

    flat: torch.Tensor  # [S]: their positions in the flattened logits of the chunk
    place: torch.Tensor  # [S]: their positions in the flattened block
    width: int
    hits: torch.Tensor  # [rows]: the columns of the targets in the block

    def gather(self, logits: torch.Tensor, scale: LogitScale) -> torch.Tensor:
        """The scaled logits of the supports [rows, width], padded; in float32, or float64 for float64."""
        own = logits.reshape(-1).index_select(0, self.flat)
        own = scale.apply_(own.to(torch.promote_types(logits.dtype, torch.float32)))
        block = own.new_full((len(self.hits), self.width), PADDING)
        block.view(-1).index_copy_(0, self.place, own)
        return block

    def spread_(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Replaces the logits of the supports by the block's values and all others by zero, in the logits' type."""
        own = values.reshape(-1).index_select(0, self.place)
        logits.zero_().view(-1).index_copy_(0, self.flat, own.to(logits.dtype))
        return logits


def pack_supports(
    supports: Sequence[Supports], targets: NDArray[np.int64], device: torch.device | str
) -> PackedSupports:
    """Joins the supports of sequences, one a target. Raises `ValueError` unless each target is in its own once."""
    sizes = np.concatenate([each.counts for each in supports]).astype(np.int64)
    tokens = np.concatenate([each.tokens for each in supports]).astype(np.int64)
    if len(sizes) != len(targets) or int(sizes.sum()) != len(tokens):
        raise ValueError(f"{len(targets)} tokens, {len(sizes)} supports of {sizes.sum()} tokens, {len(tokens)} given")
    places = np.flatnonzero(tokens == np.repeat(targets, sizes))
    owners = np.repeat(np.arange(len(targets)), sizes)[places]
    if not np.array_equal(owners, np.arange(len(targets))):
        raise ValueError("a token is not among those that it was drawn from, or is there twice")
    hits = places - (np.cumsum(sizes) - sizes)
    joined = torch.from_numpy(np.concatenate([sizes, hits, tokens]))
    if torch.device(device).type == "cuda":
        joined = joined.pin_memory()
    parts = joined.to(device, non_blocking=True).split_with_sizes([len(sizes), len(hits), len(tokens)])
    return PackedSupports(sizes, parts[0], parts[2], parts[1])


def reduce_supports(logits: torch.Tensor, block: Block, scale: LogitScale, *, delta: bool = False) -> Reduced:
    """`reduce_logits` over the supports; with `delta` the logits [rows, V] are replaced by the derivative."""
    scaled = block.gather(logits, scale)
    normalizers = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, block.hits[:, None])[:, 0] - normalizers
    entropies = normalizers - torch.linalg.vecdot((scaled - normalizers[:, None]).exp_(), scaled)
    if delta:
        _spread_deltas(logits, scaled, block, normalizers, torch.ones_like(normalizers), scale)
    return logprobs, normalizers, entropies


def deltas_of_supports(
    logits: torch.Tensor,  # [rows, V], contiguous; replaced
    block: Block,
    normalizers: torch.Tensor,  # [rows]
    factors: torch.Tensor,  # [rows], of d logprob / d logits
    scale: LogitScale,
    entropies: torch.Tensor | None = None,  # [rows]
    entropy_factors: torch.Tensor | None = None,  # [rows], of d entropy / d logits; with `entropies`
) -> torch.Tensor:
    """`factor * d logprob / d logits + entropy factor * d entropy / d logits`, in place."""
    scaled = block.gather(logits, scale)
    return _spread_deltas(logits, scaled, block, normalizers, factors, scale, entropies, entropy_factors)


def _spread_deltas(
    logits: torch.Tensor,
    scaled: torch.Tensor,  # [rows, width], overwritten
    block: Block,
    normalizers: torch.Tensor,
    factors: torch.Tensor,
    scale: LogitScale,
    entropies: torch.Tensor | None = None,
    entropy_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    bend = None if scale.softcap is None else 1 - (scaled * (scale.temperature / scale.softcap)).square_()
    logs = scaled.sub_(normalizers[:, None])
    result = logs.exp()
    if entropies is None or entropy_factors is None:
        result.mul_(-factors[:, None])
    else:  # d entropy / d logit is -p * (log p + entropy)
        result.mul_(-(factors[:, None] + entropy_factors[:, None] * (logs + entropies[:, None])))
    result.scatter_add_(1, block.hits[:, None], factors[:, None].to(result.dtype))
    result.mul_(scale.slope)
    if bend is not None:
        result.mul_(bend)
    return block.spread_(logits, result)
