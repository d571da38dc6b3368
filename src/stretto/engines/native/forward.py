"""From the state of the rows to their logits: one forward a step, or one a version where versions are whole trees."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native import probe
from stretto.engines.native.attention import Attention, Chunk, Planner
from stretto.engines.native.cache import KVCache
from stretto.engines.native.lean import LeanDecoder, is_plain
from stretto.engines.native.rows import CONTEXT, SLOT, TOKEN, Rows
from stretto.engines.native.trajectory import Prefix
from stretto.engines.native.versions import Slots


class Forward:
    """Runs the trees of `slots` over the decoding rows and the chunks of a step.

    `lean` says whether the lean forward runs or the modules of transformers; `exact`, whether a row's logits are the
    same bit for bit beside any others.
    """

    def __init__(self, slots: Slots, attention: Attention, cache: KVCache, rows: Rows, heads: int) -> None:
        self._slots, self._attention, self._rows = slots, attention, rows
        self._shape = (heads, cache.kv_heads, cache.head_size)
        self._planner = Planner(cache, heads)
        self._decoders: list[LeanDecoder] = []  # one a tree; none: the modules of transformers
        self._filling = 0  # tokens that a forward has at least
        self.exact = False

    @property
    def lean(self) -> bool:
        return bool(self._decoders)

    def prepare(self, *, lean: bool, max_tokens: int, max_context: int) -> None:
        """Choose the way of computing, `lean` where all trees allow it, and find out how it keeps rows apart."""
        trees, self._decoders = self._slots.trees, []
        if lean and all(is_plain(tree) for tree in trees):
            self._decoders = [LeanDecoder(tree, self._attention, *self._shape, max_context) for tree in trees]
        layers = self._decoders[0].projections if self._decoders else trees[0].modules()
        self._filling, self.exact = probe.exact_filling(layers, max_tokens)

    def __call__(self, chunks: list[tuple[Prefix, Chunk]]) -> list[Tensor]:
        """Logits [rows, vocabulary] of the decoding rows, if there are any; those of finished prefixes go to them."""
        rows, n = self._rows, len(self._rows)
        if not n and not chunks:
            return []
        if self._slots.mixed:
            return [self._run(0, None, chunks)]
        logits = None
        for slot in sorted({*rows.slot[:n].tolist(), *(chunk.weights_slot for _, chunk in chunks)}):
            own = np.nonzero(rows.slot[:n] == slot)[0]
            index = None if len(own) == n else own
            part = self._run(slot, index, [c for c in chunks if c[1].weights_slot == slot])
            if index is None:
                logits = part
            else:
                logits = part.new_empty(n, part.shape[1]) if logits is None else logits
                logits.index_copy_(0, torch.from_numpy(own).to(rows.device), part)
        assert logits is not None
        return [logits]

    def _run(self, tree: int, index: NDArray[np.int64] | None, chunks: list[tuple[Prefix, Chunk]]) -> Tensor:
        """One forward of the rows of `index` (None: all) and of chunks; the logits of the rows."""
        rows, n = self._rows, len(self._rows)
        ints, numbers, contexts = rows.ints[:, :n], rows.numbers[:n], rows.context[:n]
        if index is not None:
            numbers, contexts = torch.from_numpy(index).to(rows.device), contexts[index]
            ints = ints.index_select(1, numbers)
        count = len(contexts)
        filling = max(0, self._filling - count - sum(chunk.end - chunk.start for _, chunk in chunks))
        plan = self._planner.plan(
            ints[TOKEN],
            ints[CONTEXT],
            ints[SLOT],
            numbers,
            rows.cells,
            int(contexts.sum()),
            [chunk for _, chunk in chunks],
            filling,
        )
        self._attention.plan = plan
        self._slots.choose(plan.weights_slots)
        keep: Tensor | None = None  # all
        ended = [(prefix, end) for (prefix, chunk), end in zip(chunks, plan.ends, strict=True) if chunk.last]
        if chunks or filling:
            wanted = [*range(count), *(end for _, end in ended)]
            wanted += [0] * (self._filling - len(wanted))
            keep = torch.tensor(wanted, device=rows.device)
        logits: Tensor
        if self._decoders:
            logits = self._decoders[tree](plan, keep)
        else:
            logits = self._slots.trees[tree](
                input_ids=plan.tokens[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            ).logits[0]
        for place, (prefix, _) in enumerate(ended):
            prefix.logits = logits[count + place].clone()
        return logits[:count]
