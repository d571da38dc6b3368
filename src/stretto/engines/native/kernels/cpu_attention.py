"""Paged attention on a CPU, for a batch of decoding rows and chunks of prompts.

First come the *listed* tokens (decoding rows and short prompts): each has a list of the cache slots that it
attends to. The lists of all tokens are one sparse pattern: scores are a sampled product over it, the output is a
weighted bag over the values. Nothing is padded to the longest row, and each token's arithmetic is independent of its
neighbours. Then come the chunks of long prompts, each over its own context with dense attention.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engines.native.cache import KVCache
from stretto.engines.native.sequence import Chunk

SHORT = 64  # a chunk that ends at or before this position is listed token by token: cheaper than a call of its own


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """One forward: its tokens in order (listed ones, then long chunks), and the cache slots that each attends to."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    writes: Tensor  # [tokens] int64: the cache slot of each token
    weights_slots: Tensor  # [tokens] int64: the slot of the weights that each token runs under
    ends: tuple[int, ...]  # the place of each chunk's last token, in the order in which the chunks were given
    num_listed: int
    row_of_entry: Tensor  # [entries] int64: the listed token that an entry of the pattern belongs to
    columns: Tensor  # [heads * entries] int32, rows of the cache seen as [slots * kv heads, head size]
    offsets: Tensor  # [heads * listed + 1] int32
    pattern: Tensor  # the sparse pattern, without values
    long: tuple[Chunk, ...]
    cache: KVCache

    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float) -> Tensor:
        """Attends over the cache, in which the keys and values of all tokens are; see `Attend`."""
        keys, values = self.cache.of_layer[layer]
        query = q.transpose(0, 1).to(keys.dtype)  # [heads, tokens, size]
        if not self.long:
            return out.copy_(self._listed(query, keys, values, scale))
        at = self.num_listed
        out[:at].copy_(self._listed(query[:, :at], keys, values, scale))
        for chunk in self.long:
            end = at + chunk.end - chunk.start
            out[at:end].copy_(_dense(chunk, query[None, :, at:end], keys, values, scale))
            at = end
        return out

    def _listed(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns the attention of the listed tokens, [listed, heads, head size]."""
        heads, listed, size = query.shape
        if not listed:
            return query.transpose(0, 1)
        flat = query.reshape(heads * listed, size)
        scores = torch.sparse.sampled_addmm(self.pattern, flat, keys.view(-1, size).t(), beta=0.0, alpha=scale).values()
        scores = scores.view(heads, -1)
        index = self.row_of_entry.expand_as(scores)
        peak = scores.new_full((heads, listed), -math.inf).scatter_reduce_(1, index, scores, "amax")
        scores = scores.sub_(peak.index_select(1, self.row_of_entry)).exp_()
        total = torch.segment_reduce(scores.view(-1), "sum", offsets=self.offsets, unsafe=True)
        bags = torch.embedding_bag(
            values.view(-1, size), self.columns, self.offsets, False, 0, False, scores.view(-1), True
        )[0]
        return bags.div_(total.unsqueeze(-1)).view(heads, listed, size).transpose(0, 1)


def _dense(chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Returns the attention of a chunk over its own sequence, [end - start, heads, head size]."""
    group = query.shape[1] // keys.shape[1]
    key = keys.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(group, dim=0)
    value = values.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(group, dim=0)
    mask = None
    if chunk.start:
        mask = torch.ones(chunk.end - chunk.start, chunk.end, dtype=torch.bool).tril(chunk.start)
    out = F.scaled_dot_product_attention(
        query, key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


class SparseAttention:
    """Builds plans; holds the index tensors that all of them need.

    `table` [rows, positions] lists the cache slot of each position of the decoding rows.
    """

    def __init__(self, cache: KVCache, heads: int, table: Tensor) -> None:
        self._cache, self._heads, self._slots = cache, heads, table.view(-1)
        self._starts = torch.arange(len(table)) * table.shape[1]
        group = heads // cache.kv_heads
        self._kv_head = (torch.arange(heads, dtype=torch.int32) // group)[:, None]
        # Entry lists of the positions 0, 1, 2 ... of a short sequence, one after the other.
        self._triangle = torch.cat([torch.arange(i + 1) for i in range(SHORT)])
        self._numbers = torch.arange(SHORT + 1, dtype=torch.int64)
        self._counting = self._nothing = torch.empty(0)
        self._reserve(1024)
        with warnings.catch_warnings():
            # Torch says once that sparse CSR is in beta; what is used of it is compared with dense attention later.
            warnings.simplefilter("ignore", UserWarning)
            torch.sparse_csr_tensor(self._numbers[:2], self._numbers[:1], torch.zeros(1), (1, 1))

    def plan(
        self,
        tokens: Tensor,
        contexts: Tensor,
        weights_slots: Tensor,
        rows: Tensor | None,
        entries: int,
        chunks: Sequence[Chunk],
    ) -> SparsePlan:
        """Returns the plan of decoding rows and of chunks.

        A decoding row is its last token, the length of its context with that token, the slot of its weights, and its
        row in the table (`rows` None: the first ones). `entries` is the sum of the contexts.
        """
        num_rows, positions = tokens.shape[0], contexts - 1
        starts = self._starts[:num_rows] if rows is None else self._starts.index_select(0, rows)
        writes = self._slots.index_select(0, starts + positions).long()
        lengths, lists, long = contexts, list[Tensor](), tuple[Chunk, ...]()
        ends, at = {}, num_rows
        if chunks:
            short = [chunk for chunk in chunks if chunk.end <= SHORT]
            long = tuple(chunk for chunk in chunks if chunk.end > SHORT)
            lists = [c.slots[self._triangle[c.start * (c.start + 1) // 2 : c.end * (c.end + 1) // 2]] for c in short]
            lengths = torch.cat([contexts, *(self._numbers[c.start + 1 : c.end + 1] for c in short)])
            ordered = (*short, *long)
            tokens = torch.cat([tokens, *(c.tokens for c in ordered)])
            positions = torch.cat([positions, *(torch.arange(c.start, c.end) for c in ordered)])
            writes = torch.cat([writes, *(c.slots[c.start :] for c in ordered)])
            own = [weights_slots.new_full((c.end - c.start,), c.weights_slot) for c in ordered]
            weights_slots = torch.cat([weights_slots, *own])
            for chunk in ordered:
                at += chunk.end - chunk.start
                ends[id(chunk)] = at - 1
        total = entries + sum(part.shape[0] for part in lists)
        self._reserve(total)
        offsets = torch.cat((self._numbers[:1], *(lengths,) * self._heads)).cumsum(0, dtype=torch.int32)
        row_of_entry = torch.repeat_interleave(lengths, output_size=total)
        place = (starts - offsets[:num_rows]).index_select(0, row_of_entry[:entries]).add_(self._counting[:entries])
        slots = self._slots.index_select(0, place)
        if lists:
            slots = torch.cat([slots, *lists])
        columns = torch.add(self._kv_head, slots, alpha=self._cache.kv_heads).view(-1)
        size = (offsets.shape[0] - 1, self._cache.storage.shape[2] * self._cache.kv_heads)
        nothing = self._nothing[: columns.shape[0]]
        pattern = torch.sparse_csr_tensor(offsets, columns, nothing, size, check_invariants=False)
        last, listed = tuple(ends[id(chunk)] for chunk in chunks), lengths.shape[0]
        return SparsePlan(
            tokens, positions, writes, weights_slots, last, listed, row_of_entry, columns, offsets, pattern, long,
            self._cache,
        )  # fmt: skip

    def _reserve(self, entries: int) -> None:
        """Grows the tensors that are as long as the lists, by doubling."""
        if entries > self._counting.shape[0]:
            size = max(entries, 2 * self._counting.shape[0])
            self._counting = torch.arange(size)
            self._nothing = torch.zeros(self._heads * size, dtype=self._cache.storage.dtype)
