"""Prefills: one forward over the chunks of a step.

A forward of a few hundred tokens is bound by its launches. So small ones are padded to one of a few sizes, read their
inputs from fixed memory, and are captured. Padding tokens belong to no chunk: they write to the scratch page, and
nothing reads them.

Long prompts are bound by attention. A chunk that begins its sequence sees no pages but its own, so it needs no pages:
cuDNN's attention takes 0.76 of the time of the kernel over pages (8,192 tokens, H200). Such chunks come first in a
forward, those of one padded length side by side (`dense_groups`).

Only the last token of a prompt needs logits. So the last layer writes keys and values of all tokens, and computes the
rest for these few, each as a chunk of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE, KVCache, num_pages
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.device_memory import copy_to_device, to_device
from stretto.engines.native.graph_cache import Graphs
from stretto.engines.native.kernels.kernel_set import PagedKernels
from stretto.engines.native.kernels.prefill_attention import DenseGroup, dense_fits, dense_groups, dense_length
from stretto.engines.native.rows import Rows
from stretto.engines.native.sequence import Chunk, Prefix
from stretto.models.triton_jit import power_of_two

SIZES = (64, 128, 256, 512, 1024, 2048)  # tokens of the forwards that are captured
CHUNKS = 32  # that such a forward has room for


class Inputs(NamedTuple):
    """The inputs of a forward over chunks. Chunks beyond the last are empty; tokens beyond theirs are zeros."""

    packed: Tensor  # [4, tokens] int64: tokens, positions, cache slots, slots of adapters
    table: Tensor  # [chunks, pages] int32
    places: Tensor  # [2, chunks + 1] int32: position of each first token; its place, and the number of tokens
    keep: Tensor  # [2, kept] int64: tokens whose logits are wanted, and the chunk of each


class Prefills:
    """Runs chunks through the decoders and stores the logits of finished prefixes with them."""

    def __init__(
        self,
        decoders: Sequence[Decoder],  # one a tree
        cache: KVCache,
        rows: Rows,
        kernels: PagedKernels,
        graphs: Graphs,
        *,
        deterministic: bool,
    ) -> None:
        device, pages = rows.device, rows.table.shape[1]  # that a sequence has at most
        self._decoders, self._cache, self._kernels = decoders, cache, kernels
        self._graphs, self._device, self._deterministic = graphs, device, deterministic
        storage = cache.storage
        fits = not deterministic and dense_fits(storage.device, storage.dtype, cache.head_size)
        self._dense_causal = kernels.dense_causal if fits else None
        # Modules of transformers may do what cannot be captured over any number of tokens.
        self._fixed = not deterministic and all(decoder.fused for decoder in decoders)
        if self._fixed:
            self._flat = torch.zeros(4 * SIZES[-1], dtype=torch.int64, device=device)
            self._table = torch.zeros(CHUNKS, pages, dtype=torch.int32, device=device)
            self._places = torch.zeros(2, CHUNKS + 1, dtype=torch.int32, device=device)
            self._keep = torch.zeros(2, CHUNKS, dtype=torch.int64, device=device)
            self._logits = torch.zeros(CHUNKS, decoders[0].vocabulary, device=device)

    def run(self, tree: int, chunks: Sequence[Chunk], *, captured: bool) -> None:
        """Runs one forward over chunks of one tree; `captured`: as a graph, if it is small enough."""
        count = sum(chunk.end - chunk.start for chunk in chunks)
        size = next((size for size in SIZES if size >= count), 0)
        if self._fixed and size and len(chunks) <= CHUNKS:
            done, given = self._pack(chunks, size, CHUNKS, self._table.shape[1], CHUNKS)
            inputs = self._placed(given, size)

            def body() -> None:
                self._logits.copy_(self._forward(tree, inputs, size, padded=True))

            if captured:
                self._graphs.run(("prefill", tree, size, self._decoders[tree].scale), body, tree)
            else:
                body()
            logits = self._logits
        else:
            # If results must not depend on neighbours, a chunk runs alone, padded to a size of its own.
            padded = max(16, power_of_two(count)) if self._deterministic else count
            widest = max(len(chunk.prefix.pages) for chunk in chunks)
            dense, paged = self._divided(chunks)
            done, given = self._pack([*dense, *paged], padded, len(chunks), widest, None)
            inputs = Inputs(*(to_device(each, self._device) for each in given))
            longest = max((chunk.end - chunk.start for chunk in paged), default=0)
            groups = dense_groups([chunk.end for chunk in dense], [_first_slot(chunk) for chunk in dense], self._device)
            logits = self._forward(tree, inputs, longest, padded=padded > count, groups=groups)
        for i, prefix in enumerate(done):
            prefix.logits = logits[i].clone()  # a view would hold its neighbours' for as long as its group runs

    @staticmethod
    def _pack(
        chunks: Sequence[Chunk], size: int, rows: int, pages: int, kept: int | None
    ) -> tuple[list[Prefix], Inputs]:
        """Returns the prefixes that end with these chunks, and the inputs on the host, with logits for `kept` tokens.

        If `kept` is None, they are as many as the prefixes. Those beyond are the first token's.
        """
        packed, at = torch.zeros(4, size, dtype=torch.int64), 0
        table = np.zeros((rows, pages), dtype=np.int32)
        places = np.zeros((2, rows + 1), dtype=np.int32)
        done, ends = [], []
        for i, chunk in enumerate(chunks):
            own = packed[:, at : at + chunk.end - chunk.start]
            own[0], own[1] = chunk.tokens, torch.arange(chunk.start, chunk.end)
            own[2], own[3] = chunk.slots[chunk.start :], chunk.weights_slot
            table[i, : len(chunk.prefix.pages)] = chunk.prefix.pages
            places[:, i] = chunk.start, at
            at += chunk.end - chunk.start
            if chunk.last:
                done.append(chunk.prefix)
                ends.append((at - 1, i))
        places[1, len(chunks) :] = at
        keep = np.zeros((2, len(ends) if kept is None else kept), dtype=np.int64)
        keep[:, : len(ends)] = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        return done, Inputs(packed, *(torch.from_numpy(each) for each in (table, places, keep)))

    def _placed(self, given: Inputs, size: int) -> Inputs:
        """Copies the inputs to the memory that the captured forward of this size reads."""
        own = Inputs(self._flat[: 4 * size].view(4, size), self._table, self._places, self._keep)
        for into, each in zip(own, given, strict=True):
            copy_to_device(into, each)
        return own

    def _divided(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Returns the chunks whose attention does without pages, in the order of their padded lengths; and the rest."""
        if self._dense_causal is None:
            return [], list(chunks)
        dense = [chunk for chunk in chunks if not chunk.start and dense_length(chunk.end)]
        paged = [chunk for chunk in chunks if chunk.start or not dense_length(chunk.end)]
        return sorted(dense, key=lambda chunk: dense_length(chunk.end)), paged

    def _forward(
        self, tree: int, inputs: Inputs, longest: int, *, padded: bool, groups: Sequence[DenseGroup] = ()
    ) -> Tensor:
        """Returns logits [kept, vocabulary]. `padded`: there are tokens beside the chunks'.

        `groups` are the first chunks, whose attention runs without pages. `longest` bounds the lengths of the others.
        """
        tokens, positions, writes, slots = inputs.packed
        starts, offsets, table = inputs.places[0, :-1], inputs.places[1], inputs.table
        cache, kernels, dense_causal = self._cache, self._kernels, self._dense_causal
        at = 0
        if groups:
            num_dense, at = sum(len(group.lengths) for group in groups), groups[-1].end
            starts, offsets, table = starts[num_dense:], offsets[num_dense:] - at, table[num_dense:]

        def attend(layer: int, q: Tensor, out: Tensor, scale: float) -> Tensor:
            if padded:
                out.zero_()
            keys, values = cache.of_layer[layer]
            if groups and dense_causal is not None:
                made: Tensor = dense_causal(q, keys, values, writes, groups, scale, out)
                if not table.shape[0]:
                    return made
            kernels.paged_extend(q[at:], keys, values, table, starts, offsets, longest, scale, out[at:])
            return out

        keep, chunk_of = inputs.keep
        kept_table, kept_starts = inputs.table.index_select(0, chunk_of), positions.index_select(0, keep)
        kept_offsets = torch.arange(keep.shape[0] + 1, dtype=torch.int32, device=keep.device)

        def attend_kept(layer: int, q: Tensor, out: Tensor, scale: float) -> Tensor:
            keys, values = cache.of_layer[layer]
            kernels.paged_extend(q, keys, values, kept_table, kept_starts, kept_offsets, 1, scale, out)
            return out

        return self._decoders[tree](tokens, positions, writes, slots, attend, keep, attend_kept)


def _first_slot(chunk: Chunk) -> int:
    """Returns the cache slot of a first chunk's first token if its pages are consecutive; else -1."""
    pages = chunk.prefix.pages[: num_pages(chunk.end)]
    return pages[0] * PAGE if pages == list(range(pages[0], pages[0] + len(pages))) else -1
