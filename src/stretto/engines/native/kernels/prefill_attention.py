"""Causal attention of chunks of prompts over the paged cache. The chunks of several sequences are packed.

A program takes a block of one chunk's tokens with all heads of one kv head: `BLOCK_M` (token, head) pairs against tiles
of keys and values, as in flash attention. So the cache is read once for a whole group of heads, and short chunks still
fill the tensor cores. Each program finds its chunk on the device from `offsets`; the grid depends on shapes alone.

The kernel is bound by arithmetic from some hundred tokens a chunk on: 4 * size * heads operations for each visible
(token, position) pair. So tiles that every token of the block sees are read without masks; only the last one or two
have them. A short chunk after a very long context is bound by its few programs, because the context is not split.
"""

# ruff: noqa: N803, N806 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.device_memory import to_device
from stretto.engines.native.kernels.decode_attention import LOG2_E, check_operands, tile_tokens
from stretto.models.float32_products import HALF
from stretto.models.triton_jit import kernel, power_of_two, tl

# The best of the shapes that `bench/gpu/attention.py --tune` tries on an H200.
EXTEND_PAIRS = 128  # (token, head) pairs a program; fewer for short chunks and for wide vectors
EXTEND_TILE = 64  # positions a tile
EXTEND_WARPS = 8  # of a program of 128 pairs
EXTEND_STAGES = 5  # the page numbers take stages too: two tiles are in flight
DENSE_SIZE = 128  # of a head: cuDNN's attention has no larger ones on every GPU
DENSE_CAPABILITY = (9, 0)  # where it was measured to be faster
DENSE_TOKENS = 512  # of a sequence whose attention is worth a call of cuDNN
DENSE_MULTIPLE = 512  # such sequences are padded to a multiple of this, because cuDNN builds a plan for each length
DENSE_FILLED = 0.8  # of the padded length, at least
WIDE_STAGES = 3  # of vectors of more than 256 bytes: small GPUs have 99 KiB of shared memory a program


def paged_extend(
    q: Tensor,  # [tokens, heads, size]
    keys: Tensor,  # [slots, kv heads, size]
    values: Tensor,
    table: Tensor,  # [chunks, pages] int32
    starts: Tensor,  # [chunks]: position of each chunk's first token
    offsets: Tensor,  # [chunks + 1]: where each chunk begins among the tokens, and their number
    longest_chunk: int,
    scale: float,
    out: Tensor,  # [tokens, heads, size]
) -> Tensor:
    """Computes the attention of each token at position p over the positions 0 .. p of its own sequence, into `out`.

    Keys and values of the tokens are in the cache already. `longest_chunk` bounds the chunks' lengths; it affects the
    shape of the blocks and not the result. Table entries beyond a sequence's last token are not read.
    """
    tokens, heads, size = q.shape
    chunks, kv_heads = table.shape[0], keys.shape[1]
    check_operands(q, keys, values, out)
    if not tokens:
        return out
    group, block_size = heads // kv_heads, power_of_two(size)
    pairs = min(EXTEND_PAIRS, EXTEND_PAIRS * 256 // max(block_size * q.element_size(), 256))
    pairs = max(16, power_of_two(group), min(pairs, power_of_two(longest_chunk * group)))
    wide = block_size * keys.element_size() > 256  # bytes of a vector
    tile = tile_tokens(block_size, keys.element_size()) if wide else EXTEND_TILE
    # The first block of a chunk that begins at token t is t // block + (chunks before it), which leaves enough room.
    blocks = tokens // (pairs // group) + chunks
    _extend_kernel[(blocks * kv_heads,)](
        q, keys, values, table, starts, offsets, out, scale * LOG2_E, chunks, blocks, *q.stride()[:2],
        *keys.stride()[:2], *values.stride()[:2], table.stride(0), *out.stride()[:2], KV_HEADS=kv_heads, GROUP=group,
        SIZE=size, BLOCK_M=pairs, BLOCK_N=tile, BLOCK_SIZE=block_size,
        BLOCK_CHUNKS=power_of_two(chunks), PAGE_SIZE=PAGE, num_warps=EXTEND_WARPS if pairs >= 128 else 4,
        num_stages=WIDE_STAGES if wide else EXTEND_STAGES,
    )  # fmt: skip
    return out


def dense_fits(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """True if `dense_causal` can run there, for heads of this size."""
    if device.type != "cuda" or dtype not in HALF or size > DENSE_SIZE or size % 8:
        return False
    available = bool(torch.backends.cudnn.is_available())  # type: ignore[no-untyped-call]
    return available and torch.cuda.get_device_capability(device) >= DENSE_CAPABILITY


def dense_length(length: int) -> int:
    """Returns the length that `dense_causal` pads a sequence to; 0 if the sequence should run over pages."""
    padded = -(-length // DENSE_MULTIPLE) * DENSE_MULTIPLE
    return padded if length >= DENSE_TOKENS and length >= DENSE_FILLED * padded else 0


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Sequences of one padded length that lie side by side and are one call of cuDNN. Each begins at position 0."""

    begin: int  # where the first one begins among the tokens
    lengths: tuple[int, ...]
    padded: int
    first_slot: int  # keys and values of all sequences are one slice of the cache from here on; -1: they are gathered
    rows: Tensor | None  # [sequences * padded] int64: the token of each place; None: there is nothing to pad
    back: Tensor | None  # [tokens] int64: the place of each token

    @property
    def end(self) -> int:
        return self.begin + sum(self.lengths)


def dense_groups(lengths: Sequence[int], first_slots: Sequence[int], device: torch.device) -> list[DenseGroup]:
    """Groups sequences that lie side by side, those of one `dense_length` next to each other.

    `first_slots`: where the keys and values of each sequence begin, if its pages are consecutive; else -1. cuDNN builds
    a plan for each number of sequences, so a group has a power of two of them.
    """
    groups, at, begin = [], 0, 0
    while at < len(lengths):
        padded, count = dense_length(lengths[at]), 1
        while at + 2 * count <= len(lengths) and all(
            dense_length(length) == padded for length in lengths[at + count : at + 2 * count]
        ):
            count *= 2
        own, slots = tuple(lengths[at : at + count]), first_slots[at : at + count]
        rows = back = None
        first = -1
        if sum(own) < count * padded:
            # What pads a sequence comes last, where no real token sees it: its last token again, which is finite.
            places = np.minimum(np.arange(padded), np.array(own)[:, None] - 1)
            begins = begin + np.cumsum((0, *own[:-1]))
            rows = to_device(np.ascontiguousarray((places + begins[:, None]).reshape(-1)), device)
            real = np.concatenate([np.arange(length) + i * padded for i, length in enumerate(own)])
            back = to_device(real, device)
        elif slots[0] >= 0 and all(slot == slots[0] + i * padded for i, slot in enumerate(slots)):
            first = slots[0]
        groups.append(DenseGroup(begin, own, padded, first, rows, back))
        begin += sum(own)
        at += count
    return groups


def dense_causal(
    q: Tensor,  # [tokens, heads, size]
    keys: Tensor,  # [slots, kv heads, size]
    values: Tensor,
    slots: Tensor,  # [tokens] int64: of each token's keys and values
    groups: Sequence[DenseGroup],  # of the first tokens
    scale: float,
    out: Tensor,  # [tokens, heads, size]
) -> Tensor:
    """Computes each sequence's causal attention over itself by cuDNN. Half precision, on CUDA.

    Returns `out`, of which the tokens of the groups are written, or cuDNN's own output if one group has all tokens.
    """
    for group in groups:
        begin, end, count = group.begin, group.end, len(group.lengths)
        query = q[begin:end] if group.rows is None else q.index_select(0, group.rows)
        if group.first_slot >= 0:
            own = slice(group.first_slot, group.first_slot + end - begin)
            key, value = keys[own], values[own]
        else:
            where = slots[begin:end] if group.rows is None else slots.index_select(0, group.rows)
            key, value = keys.index_select(0, where), values.index_select(0, where)
        # Called by its ATen name: to choose the backend of `scaled_dot_product_attention` is a setting of all threads.
        made: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.view(count, group.padded, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)),
            None, False, 0.0, True, False, scale=scale,
        )[0]  # fmt: skip
        made = made.transpose(1, 2).flatten(0, 1)
        if group.back is not None:
            made = made.index_select(0, group.back)
        if end - begin == q.shape[0]:
            return made
        out[begin:end].copy_(made)
    return out


@kernel()
def _extend_tile(  # type: ignore[no-untyped-def]
    query, key_base, value_base, pages, at, end, position, column, peak, total, sums, scale, key_slot, value_slot,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the tile of positions from `at` on into an online softmax. Unless `MASKED`, every token sees all of it.

    Both ways compute a visible score alike, so that a token's bits do not depend on where its block begins. `scale` is
    positive, so the peak of the scaled scores is the scaled peak.
    """
    entry = at // PAGE_SIZE + tl.arange(0, BLOCK_N // PAGE_SIZE)
    if MASKED:
        page = tl.load(pages + entry, mask=entry * PAGE_SIZE < end, other=0).to(tl.int64)
    else:
        page = tl.load(pages + entry).to(tl.int64)
    slot = tl.reshape(page[:, None] * PAGE_SIZE + tl.arange(0, PAGE_SIZE)[None, :], (BLOCK_N,))
    key, value = key_base + slot[:, None] * key_slot, value_base + slot[:, None] * value_slot
    if MASKED:
        # Positions beyond the block's last token are not read: a weight of zero times NaN is NaN.
        other = at + tl.arange(0, BLOCK_N)
        present = (other < end)[:, None] & (column < SIZE)[None, :]
        key, value = tl.load(key, mask=present, other=0.0), tl.load(value, mask=present, other=0.0)
    elif SIZE == BLOCK_SIZE:
        key, value = tl.load(key), tl.load(value)
    else:
        present = (column < SIZE)[None, :]
        key, value = tl.load(key, mask=present, other=0.0), tl.load(value, mask=present, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        # Every pair sees position 0, so its peak is finite from the first tile on.
        visible = (other[None, :] <= position[:, None]) & (other < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(peak - higher)
    total = total * fade + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision="ieee")
    return higher, total, sums


@kernel("chunks", "blocks")
def _extend_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, table, starts, offsets, out, scale, chunks, blocks, q_token, q_head, key_slot, key_head,
    value_slot, value_head, table_row, out_token, out_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program for each block of tokens and kv head. The last blocks of a chunk read the most, and start first.

    `scale` is for exponentials to base 2.
    """
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    block = blocks - 1 - tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    number = tl.arange(0, BLOCK_CHUNKS)
    begins = tl.load(offsets + number, mask=number < chunks, other=0).to(tl.int32)
    firsts = begins // BLOCK_TOKENS + number
    chunk = tl.sum(((firsts <= block) & (number < chunks)).to(tl.int32), 0) - 1
    begin = tl.load(offsets + chunk).to(tl.int32)
    length = tl.load(offsets + chunk + 1).to(tl.int32) - begin
    ahead = (block - begin // BLOCK_TOKENS - chunk) * BLOCK_TOKENS  # the chunk's tokens before this block
    if ahead >= length:
        return
    origin = tl.load(starts + chunk).to(tl.int32) + ahead
    end = origin + tl.minimum(BLOCK_TOKENS, length - ahead)

    pair = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_SIZE)
    token = ahead + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    position = origin + pair // GROUP
    real = ((pair < BLOCK_TOKENS * GROUP) & (token < length))[:, None] & (column < SIZE)[None, :]
    line = (begin + token).to(tl.int64)
    query = tl.load(q + line[:, None] * q_token + head[:, None] * q_head + column[None, :], mask=real, other=0.0)
    pages = table + chunk.to(tl.int64) * table_row
    key_base = keys + kv_head * key_head + column[None, :]
    value_base = values + kv_head * value_head + column[None, :]

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_SIZE), tl.float32)
    before = (origin + 1) // BLOCK_N * BLOCK_N  # positions in tiles that every token of the block sees
    for at in range(0, before, BLOCK_N):
        peak, total, sums = _extend_tile(
            query, key_base, value_base, pages, at, end, position, column, peak, total, sums, scale, key_slot,
            value_slot, SIZE, BLOCK_N, BLOCK_SIZE, PAGE_SIZE, False,
        )  # fmt: skip
    for at in range(before, end, BLOCK_N):
        peak, total, sums = _extend_tile(
            query, key_base, value_base, pages, at, end, position, column, peak, total, sums, scale, key_slot,
            value_slot, SIZE, BLOCK_N, BLOCK_SIZE, PAGE_SIZE, True,
        )  # fmt: skip
    place = out + line[:, None] * out_token + head[:, None] * out_head + column[None, :]
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
