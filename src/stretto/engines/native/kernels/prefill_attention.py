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

import torch
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.decode_attention import LOG2_E, check_operands, tile_tokens
from stretto.engines.native.kernels.decode_work_list import power_of_two
from stretto.models.float32_products import HALF
from stretto.models.triton_jit import kernel, tl

# The best of the shapes that `bench/gpu/attention.py --tune` tries on an H200.
EXTEND_PAIRS = 128  # (token, head) pairs a program; fewer for short chunks and for wide vectors
EXTEND_TILE = 64  # positions a tile
EXTEND_WARPS = 8  # of a program of 128 pairs
EXTEND_STAGES = 5  # the page numbers take stages too: two tiles are in flight
DENSE_SIZE = 128  # of a head: cuDNN's attention has no larger ones on every GPU
DENSE_CAPABILITY = (9, 0)  # where it was measured to be faster
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


def dense_causal(
    q: Tensor,  # [tokens, heads, size]
    keys: Tensor,  # [slots, kv heads, size]
    values: Tensor,
    slots: Tensor,  # [tokens] int64: of each token's keys and values
    lengths: Sequence[int],  # of the sequences, which lie side by side; each begins at position 0
    multiple: int,
    scale: float,
    out: Tensor,  # [tokens, heads, size]
) -> Tensor:
    """Computes each sequence's causal attention over itself by cuDNN, into `out`. Half precision, on CUDA.

    A sequence is padded to a `multiple` of tokens. What pads it comes last, where no real token sees it: keys and
    values of its last token, which are finite, and queries whose results are left out.
    """
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        begin += length
        query, where = q[own], slots[own]
        if filling := -length % multiple:
            query = torch.cat((query, query[-1:].expand(filling, -1, -1)))
            where = torch.cat((where, where[-1:].expand(filling)))
        key, value = keys.index_select(0, where), values.index_select(0, where)
        # Called by its ATen name: to choose the backend of `scaled_dot_product_attention` is a setting of all threads.
        made = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)), None, False, 0.0, True, False, scale=scale
        )[0]
        out[own].copy_(made[0, :, :length].transpose(0, 1))
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
