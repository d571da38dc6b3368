"""Prefills: one forward over the chunks of a step.

A forward of a few hundred tokens is bound by its launches. So small ones are padded to one of a few sizes, read their
inputs from fixed memory, and are captured. Padding tokens belong to no chunk: they write to the scratch page, and
nothing reads them.

Long prompts are bound by attention. A chunk that begins its sequence sees no pages but its own, so its keys and values
can be gathered, and cuDNN's attention takes 0.76 of the time of the kernel over pages (8,192 tokens, H200). It builds a
plan for each size, so such chunks are padded to a few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engines.native.cache import KVCache
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.device_memory import copy_to_device, to_device
from stretto.engines.native.graph_cache import Graphs
from stretto.engines.native.kernels.decode_work_list import power_of_two
from stretto.engines.native.kernels.kernel_set import PagedKernels
from stretto.engines.native.kernels.prefill_attention import dense_fits
from stretto.engines.native.rows import Rows
from stretto.engines.native.sequence import Chunk, Prefix

SIZES = (64, 128, 256, 512, 1024, 2048)  # tokens of the forwards that are captured
CHUNKS = 32  # that such a forward has room for
DENSE_TOKENS = 2048  # of a first chunk whose attention runs without pages
DENSE_MULTIPLE = 512  # such chunks are padded to a multiple of this


class Inputs(NamedTuple):
    """The inputs of a forward over chunks. Chunks beyond the last are empty; tokens beyond theirs are zeros."""

    packed: Tensor  # [4, tokens] int64: tokens, positions, cache slots, slots of adapters
    table: Tensor  # [chunks, pages] int32
    places: Tensor  # [2, chunks + 1] int32: position of each first token; its place, and the number of tokens
    keep: Tensor  # [kept] int64: tokens whose logits are wanted


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
            self._keep = torch.zeros(CHUNKS, dtype=torch.int64, device=device)
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
            done, given = self._pack(chunks, padded, len(chunks), widest, None)
            inputs = Inputs(*(to_device(each, self._device) for each in given))
            longest = max(chunk.end - chunk.start for chunk in chunks)
            logits = self._forward(tree, inputs, longest, padded=padded > count, dense=self._dense(chunks))
        for i, prefix in enumerate(done):
            prefix.logits = logits[i].clone()  # a view would hold its neighbours' for as long as its group runs

    @staticmethod
    def _pack(
        chunks: Sequence[Chunk], size: int, rows: int, pages: int, kept: int | None
    ) -> tuple[list[Prefix], Inputs]:
        """Returns the prefixes that end with these chunks, and the inputs on the host, with logits for `kept` tokens.

        If `kept` is None, they are as many as the prefixes.
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
                ends.append(at - 1)
        places[1, len(chunks) :] = at
        keep = np.zeros(max(1, len(ends)) if kept is None else kept, dtype=np.int64)
        keep[: len(ends)] = ends
        return done, Inputs(packed, *(torch.from_numpy(each) for each in (table, places, keep)))

    def _placed(self, given: Inputs, size: int) -> Inputs:
        """Copies the inputs to the memory that the captured forward of this size reads."""
        own = Inputs(self._flat[: 4 * size].view(4, size), self._table, self._places, self._keep)
        for into, each in zip(own, given, strict=True):
            copy_to_device(into, each)
        return own

    def _dense(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """Returns the lengths of the chunks if attention can do without pages for all of them; else None."""
        if self._dense_causal is None or any(chunk.start or chunk.end < DENSE_TOKENS for chunk in chunks):
            return None
        return [chunk.end for chunk in chunks]

    def _forward(
        self, tree: int, inputs: Inputs, longest: int, *, padded: bool, dense: Sequence[int] | None = None
    ) -> Tensor:
        """Returns logits [kept, vocabulary]. `longest` bounds the chunks' lengths; `padded`: there are other tokens.

        `dense` are the lengths of chunks whose attention runs without pages.
        """
        tokens, positions, writes, slots = inputs.packed
        starts, offsets = inputs.places[0, :-1], inputs.places[1]
        cache, kernels = self._cache, self._kernels

        def attend(layer: int, q: Tensor, out: Tensor, scale: float) -> None:
            if padded:
                out.zero_()
            keys, values = cache.of_layer[layer]
            if dense is not None and self._dense_causal is not None:
                self._dense_causal(q, keys, values, writes, dense, DENSE_MULTIPLE, scale, out)
                return
            kernels.paged_extend(q, keys, values, inputs.table, starts, offsets, longest, scale, out)

        return self._decoders[tree](tokens, positions, writes, slots, attend, inputs.keep)
