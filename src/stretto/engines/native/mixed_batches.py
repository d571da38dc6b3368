"""Forwards over mixed batches: the decoding rows and the chunks of prompts of a step run together.

On a CPU a second forward for the prompts would cost as much again in operations as the first. The rows are dense, and
their tokens are known before the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import KVCache
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.kernels.cpu_attention import SparseAttention
from stretto.engines.native.rows import CONTEXT, MIN_P, SLOT, TEMPERATURE, TOKEN, TOP_K, TOP_P, Drawn, Rows
from stretto.engines.native.sampling import Truncation, host_uniforms, sample
from stretto.engines.native.sequence import Chunk
from stretto.engines.native.versions import Slots
from stretto.types import MAX_SUPPORT

AHEAD = 8  # draws whose uniform numbers are made at once, while no row comes or goes
COMING = np.arange(AHEAD)[:, None]


class MixedForward:
    """Runs the decoders over the decoding rows and the chunks of a step, and draws.

    A forward has at least `padding` tokens, so that a row's logits are the same bit for bit beside any others.
    """

    def __init__(
        self,
        slots: Slots,
        decoders: Sequence[Decoder],  # one a tree
        cache: KVCache,
        rows: Rows,
        heads: int,
        padding: int,
    ) -> None:
        self._slots, self._decoders, self._rows, self._padding = slots, decoders, rows, padding
        self._attention = SparseAttention(cache, heads, rows.table)
        self._ahead = np.zeros((AHEAD, 0))  # uniform numbers of coming draws
        self._ahead_of: NDArray[np.int64] | None = None  # the rows that they are for
        self._taken = 0

    def run(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Returns logits [rows, vocabulary] of the decoding rows. Those of finished prefixes are stored with them.

        The list is empty if there is nothing to run.
        """
        rows, count = self._rows, len(self._rows)
        if not count and not chunks:
            return []
        if self._slots.one_tree:
            return [self._run_tree(0, None, chunks)]
        logits = None
        slots = rows.slot[:count]
        for tree in sorted({*slots.tolist(), *(chunk.weights_slot for chunk in chunks)}):
            own = np.nonzero(slots == tree)[0]
            index = None if len(own) == count else own
            part = self._run_tree(tree, index, [chunk for chunk in chunks if chunk.weights_slot == tree])
            if index is None:
                logits = part
            else:
                logits = part.new_empty(count, part.shape[1]) if logits is None else logits
                logits.index_copy_(0, torch.from_numpy(own), part)
        assert logits is not None
        return [logits]

    def _run_tree(self, tree: int, index: NDArray[np.int64] | None, chunks: Sequence[Chunk]) -> Tensor:
        """Runs one forward of the rows of `index` (None: all) and of chunks; returns the logits of the rows."""
        rows, used = self._rows, len(self._rows)
        count = used if index is None else len(index)
        padding = max(0, self._padding - count - sum(chunk.end - chunk.start for chunk in chunks))
        if padding:
            rows.clear_from(used)
        numbers: Tensor | None = None
        if index is None:
            ints, contexts = rows.ints[:, : count + padding], rows.context[: count + padding]
        else:
            index = np.concatenate([index, np.arange(used, used + padding)])
            numbers, contexts = torch.from_numpy(index), rows.context[index]
            ints = rows.ints.index_select(1, numbers)
        plan = self._attention.plan(ints[TOKEN], ints[CONTEXT], ints[SLOT], numbers, int(contexts.sum()), chunks)
        keep: Tensor | None = None  # all
        ended = [(chunk.prefix, end) for chunk, end in zip(chunks, plan.ends, strict=True) if chunk.last]
        if chunks:
            wanted = [*range(count), *(end for _, end in ended)]
            wanted += [0] * (self._padding - len(wanted))
            keep = torch.tensor(wanted)
        logits = self._decoders[tree](plan.tokens, plan.positions, plan.writes, plan.weights_slots, plan.attend, keep)
        for place, (prefix, _) in enumerate(ended):
            prefix.logits = logits[count + place].clone()
        return logits[:count]

    def draw(self, logits: Tensor) -> Drawn:
        """Draws a token for every row from logits [rows, vocabulary], and advances the state of the rows."""
        rows, count = self._rows, len(self._rows)
        ints, floats, truncation = rows.ints[:, :count], rows.floats[:, :count], None
        uniform = self._next_uniforms()
        if rows.any_truncates:
            truncation = Truncation(ints[TOP_K], floats[TOP_P], floats[MIN_P])
        temperature = floats[TEMPERATURE] if rows.any_scaled else None
        tokens, logprobs, left = sample(logits, uniform, temperature, truncation, rows.any_greedy)
        ints[TOKEN].copy_(tokens)
        ints[CONTEXT].add_(1)
        rows.context[:count] += 1
        counts = candidates = None
        if left is not None:
            counts = left.counts.int().numpy()
            recorded = counts[rows.width[:count] > 0]
            width = min(int(recorded.max(initial=1)), MAX_SUPPORT)
            candidates = left.order[:, :width].int().numpy()
        return Drawn(tokens.numpy(), logprobs.numpy(), counts, candidates)

    def _next_uniforms(self) -> Tensor:
        """Returns the uniform number [rows] of each row's next draw; they are made for several steps at once."""
        rows, numbers = self._rows, self._rows.numbers()
        if numbers is not self._ahead_of or self._taken == AHEAD:
            coming = rows.made[: len(numbers)] + COMING
            self._ahead, self._ahead_of, self._taken = host_uniforms(rows.seed[: len(numbers)], coming), numbers, 0
        self._taken += 1
        return torch.from_numpy(self._ahead[self._taken - 1])
