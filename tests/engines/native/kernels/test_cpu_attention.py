"""Attention of mixed batches on a CPU: rows, short and long chunks, against dense attention of each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_references import dense_attention
from torch import Tensor

from stretto.engines.native.cache import PAGE, KVCache
from stretto.engines.native.kernels.cpu_attention import SHORT, SparseAttention
from stretto.engines.native.sequence import Chunk, Prefix

HEADS, KV_HEADS, SIZE = 4, 2, 16


class Batch:
    """Rows of some contexts and chunks of some sequences, on scattered pages."""

    def __init__(self, contexts: list[int], chunks: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [*contexts, *(end for _, end in chunks)]
        pages = [-(-length // PAGE) for length in lengths]
        self.cache = KVCache(1, KV_HEADS, SIZE, sum(pages) + 1, torch.float32, torch.device("cpu"))
        self.cache.storage.normal_(generator=generator)
        scattered = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
        self.slots = [self.cache.slots(own.tolist(), n) for own, n in zip(scattered, lengths, strict=True)]
        self.table = torch.zeros(len(contexts) + 3, 20 * PAGE, dtype=torch.int32)
        for row in range(len(contexts)):
            self.table[row, : contexts[row]] = self.slots[row]
        self.contexts = contexts
        self.chunks = [
            Chunk(
                Prefix(i, torch.zeros(end), 0), torch.arange(start, end), self.slots[len(contexts) + i], start, end,
                i, last=True,
            )
            for i, (start, end) in enumerate(chunks)
        ]  # fmt: skip

    def plan(self, rows: Tensor | None = None) -> Any:
        contexts = torch.tensor(self.contexts, dtype=torch.int64)
        contexts = contexts if rows is None else contexts[rows]
        slots = torch.full_like(contexts, 7)
        attention = SparseAttention(self.cache, HEADS, self.table)
        return attention.plan(contexts + 100, contexts, slots, rows, int(contexts.sum()), self.chunks)


@pytest.mark.parametrize(
    ("contexts", "chunks"),
    [
        ([1, 17, 300, 16, 5], []),
        ([40, 3], [(0, 9), (0, SHORT), (5, 20)]),
        ([], [(0, 200)]),
        ([12], [(64, 130), (0, 30), (0, 65), (100, 101)]),
    ],
)
def test_each_token_attends_to_its_own_sequence_up_to_itself(
    contexts: list[int], chunks: list[tuple[int, int]]
) -> None:
    batch = Batch(contexts, chunks)
    plan = batch.plan()
    tokens = len(plan.tokens)
    q = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(9))
    out = torch.full_like(q, torch.nan)
    plan.attend(0, q, out, 0.3)
    keys, values = batch.cache.of_layer[0]
    expected = torch.full_like(q, torch.nan)
    for row, context in enumerate(contexts):
        own = batch.slots[row].long()[:context]
        expected[row] = dense_attention(q[row, None], keys[own], values[own], 0.3)[0]
    for chunk, end in zip(batch.chunks, plan.ends, strict=True):
        own, place = chunk.slots.long(), slice(end + 1 - (chunk.end - chunk.start), end + 1)
        expected[place] = dense_attention(q[place], keys[own], values[own], 0.3)
        assert plan.tokens[place].tolist() == plan.positions[place].tolist() == list(range(chunk.start, chunk.end))
        assert plan.writes[place].tolist() == chunk.slots[chunk.start :].tolist()
        assert set(plan.weights_slots[place].tolist()) == {chunk.weights_slot}
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_some_rows_alone_are_those_of_the_table() -> None:
    batch = Batch([20, 33, 8, 50], [])
    whole, part = batch.plan(), batch.plan(torch.tensor([1, 3]))
    assert part.writes.tolist() == whole.writes[[1, 3]].tolist()
    q = torch.randn(4, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    all_rows, two_rows = torch.empty_like(q), torch.empty(2, HEADS, SIZE)
    whole.attend(0, q, all_rows, 0.5)
    part.attend(0, q[[1, 3]], two_rows, 0.5)
    assert torch.equal(two_rows, all_rows[[1, 3]]), "bit for bit, whoever stands beside them"
