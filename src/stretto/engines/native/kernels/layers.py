"""The operations of a plain pre-norm decoder between its matrix products, each in one pass over memory.

The first LoRA product is part of the base product: the weights of a product are [out + H, in], where the H extra rows
are the `A` of all slots, and each token's `h = x A` is in H extra columns of the output. Of those, the j-th layer of a
fused product (q, k, v or gate, up) has the columns from `j * num_slots * rank` on, and in them slot `s` those from
`s * rank` on. The second product is computed here with `b` [num_slots * rank, out] of each layer. A token *selects* the
product with its own slot's rows, so nothing of another version, not even a NaN, can reach it. `scale` is that of all
adapters.

`tests/cases/kernel_references.py` defines the result of each kernel in plain torch, with the same signature. The input
of a product or of attention is rounded to the model's dtype, once; everything between is float32, and so is the
residual stream, as in the trainer's decoder. Launch grids depend on shapes alone, so everything can be captured in a
CUDA graph. The last dimension of every tensor is contiguous; each element of `slots` [tokens] is in [0, num_slots).
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.models.triton_jit import kernel, power_of_two, tl

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
ACTIVATION_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu"}

# Measured on an H200 at 64 to 1,536 tokens of two models (`bench/results/gpu/kernel_variants`). Tokens of a program:
# (up to so many tokens, so many). Large tiles read less of `b`, small ones fill more multiprocessors.
GATE_TILES: tuple[tuple[int, int], ...] = ((128, 16),)
TOKEN_TILES: tuple[tuple[int, int], ...] = ((2048, 16),)  # of the other kernels
LARGEST_TILE = 64
COLUMNS = 64
TILE_WARPS = 4
STAGES, GATE_STAGES = 2, 3  # slots whose `b` a program has in flight
STAGE_BYTES = 65536  # of shared memory that they may take


@kernel()
def _adapters(  # type: ignore[no-untyped-def]
    h, b, columns, other_h, other_b, other_columns, slots, inside_rows, inside_columns, B_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns two products `h_own @ b_own` [TILE, COLUMNS] of the same tokens in float32; zeros for a `b` of None.

    `h` [TILE] points at each token's column of the first slot. The products with each slot from the smallest to the
    largest of the tile are computed for all its tokens, and kept for those of that slot: slots between them are read
    even if no token has them. The loop has no branch, so the loads of the next slots are in flight. A row of a product
    depends on its own row of `h` alone, so a token's bits do not depend on its neighbours.
    """
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    other_total = tl.zeros((TILE, COLUMNS), tl.float32)
    if b is not None or other_b is not None:
        slots = tl.where(inside_rows, slots, NUM_SLOTS).to(tl.int32)
        ranks = tl.arange(0, RANK_PADDED)
        place = slots[:, None] * RANK + ranks[None, :]
        mine = inside_rows[:, None] & (ranks < RANK)[None, :]
        if b is not None:
            own = tl.load(h[:, None] + place, mask=mine, other=0.0).to(b.dtype.element_ty)
        if other_b is not None:
            other_own = tl.load(other_h[:, None] + place, mask=mine, other=0.0).to(other_b.dtype.element_ty)
        present = (ranks < RANK)[:, None] & inside_columns[None, :]
        smallest = tl.min(slots, 0)
        largest = tl.max(tl.where(inside_rows, slots, -1), 0)
        for slot in tl.range(smallest, largest + 1, num_stages=STAGES):
            line = (slot * RANK + ranks)[:, None]
            kept = (slots == slot)[:, None]
            if b is not None:
                factor = tl.load(b + line * B_STRIDE + columns[None, :], mask=present, other=0.0)
                total = tl.where(kept, tl.dot(own, factor, input_precision="ieee"), total)
            if other_b is not None:
                factor = tl.load(other_b + line * OTHER_STRIDE + other_columns[None, :], mask=present, other=0.0)
                other_total = tl.where(kept, tl.dot(other_own, factor, input_precision="ieee"), other_total)
    return total, other_total


@kernel()
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    stream, added, weight, out, epsilon, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row, which it holds in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    value = tl.load(stream + row * STRIDE + columns, mask=inside, other=0.0)
    if added is not None:
        value += tl.load(added + row * ADDED_STRIDE + columns, mask=inside, other=0.0)
        tl.store(stream + row * STRIDE + columns, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + epsilon)
    value = value * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUT_STRIDE + columns, value.to(out.dtype.element_ty), mask=inside)


@kernel("tokens")
def _add_kernel(  # type: ignore[no-untyped-def]
    stream, added, slots, b, tokens, scale, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr, HIDDEN: tl.constexpr,
    B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each tile of tokens and columns adds the adapters to the stream."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, whole = rows < tokens, columns < HIDDEN
    inside = own[:, None] & whole[None, :]
    slot = tl.load(slots + rows, mask=own, other=0)
    place = stream + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    value = tl.load(place, mask=inside, other=0.0)
    h = added + rows.to(tl.int64) * ADDED_STRIDE + HIDDEN
    adapted, _ = _adapters(h, b, columns, h, None, columns, slot, own, whole, B_STRIDE, 0, NUM_SLOTS, RANK,
                           RANK_PADDED, TILE, COLUMNS, STAGES)  # fmt: skip
    tl.store(place, value + scale * adapted, mask=inside)


@kernel()
def _head(  # type: ignore[no-untyped-def]
    start, h, b, slots, own, head, weight, cos_sin, position, place, epsilon, scale, ROTATED: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, SIZE: tl.constexpr, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes one head of the tokens of a tile, as two halves, because the rotary embedding pairs their columns."""
    halves = tl.arange(0, HALF_PADDED)
    whole = halves < SIZE // 2
    inside = own[:, None] & whole[None, :]
    columns = head * SIZE + halves
    first = tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start[:, None] + columns[None, :] + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    of_first, of_second = _adapters(h, b, columns, h, b, columns + SIZE // 2, slots, own, whole, B_STRIDE, B_STRIDE,
                                    NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED, STAGES)  # fmt: skip
    first += scale * of_first
    second += scale * of_second
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(squares / SIZE + epsilon)[:, None]
        of_first = tl.load(weight + halves, mask=whole, other=0.0).to(tl.float32)
        of_second = tl.load(weight + SIZE // 2 + halves, mask=whole, other=0.0).to(tl.float32)
        first = first * inverse * of_first[None, :]
        second = second * inverse * of_second[None, :]
    place = place[:, None] + halves[None, :]
    if ROTATED:
        angle = cos_sin + position[:, None] * TABLE_STRIDE + halves[None, :]
        cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angle + SIZE, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (first * cos - second * sin).to(place.dtype.element_ty), mask=inside)
        cos = tl.load(angle + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angle + SIZE + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
        tl.store(place + SIZE // 2, (second * cos + first * sin).to(place.dtype.element_ty), mask=inside)
    else:
        tl.store(place, first.to(place.dtype.element_ty), mask=inside)
        tl.store(place + SIZE // 2, second.to(place.dtype.element_ty), mask=inside)


@kernel("tokens")
def _split_heads_kernel(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos_sin, positions, slots, b_q, b_k, b_v, write_slots, keys, values, q_out, tokens,
    epsilon, scale, STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, Q_HEAD: tl.constexpr, K_STRIDE: tl.constexpr,
    K_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr, BQ_STRIDE: tl.constexpr,
    BK_STRIDE: tl.constexpr, BV_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = rows < tokens
    rows = rows.to(tl.int64)
    q_start = qkv + rows * STRIDE
    k_start = q_start + HEADS * SIZE
    v_start = k_start + KV_HEADS * SIZE
    h = v_start + KV_HEADS * SIZE
    slot = tl.load(slots + rows, mask=own, other=0)
    position = tl.load(positions + rows, mask=own, other=0)
    target = tl.load(write_slots + rows, mask=own, other=0)
    if head < HEADS:
        place = q_out + rows * Q_STRIDE + head * Q_HEAD
        _head(q_start, h, b_q, slot, own, head, q_weight, cos_sin, position, place, epsilon, scale, True, TABLE_STRIDE,
              SIZE, BQ_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED, STAGES)  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        h += NUM_SLOTS * RANK
        place = keys + target.to(tl.int64) * K_STRIDE + head * K_HEAD
        _head(k_start, h, b_k, slot, own, head, k_weight, cos_sin, position, place, epsilon, scale, True, TABLE_STRIDE,
              SIZE, BK_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED, STAGES)  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        h += 2 * NUM_SLOTS * RANK
        place = values + target.to(tl.int64) * V_STRIDE + head * V_HEAD
        _head(v_start, h, b_v, slot, own, head, None, cos_sin, position, place, epsilon, scale, False, TABLE_STRIDE,
              SIZE, BV_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED, STAGES)  # fmt: skip


@kernel()
def activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one of `ACTIVATIONS` of `x`, elementwise and in float32, for kernels."""
    if ACTIVATION == "silu":
        active = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the logistic function of 2 y.
        active = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        active = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    return active


@kernel("tokens")
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up, slots, b_gate, b_up, out, tokens, scale, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, whole = rows < tokens, columns < WIDTH
    inside = own[:, None] & whole[None, :]
    start = gate_up + rows.to(tl.int64) * STRIDE
    slot = tl.load(slots + rows, mask=own, other=0)
    gate = tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0)
    up = tl.load(start[:, None] + WIDTH + columns[None, :], mask=inside, other=0.0)
    h = start + 2 * WIDTH
    of_gate, of_up = _adapters(h, b_gate, columns, h + NUM_SLOTS * RANK, b_up, columns, slot, own, whole, GATE_STRIDE,
                               UP_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, COLUMNS, STAGES)  # fmt: skip
    active = activate(gate.to(tl.float32) + scale * of_gate, ACTIVATION) * (up.to(tl.float32) + scale * of_up)
    place = out + rows.to(tl.int64)[:, None] * OUT_STRIDE + columns[None, :]
    tl.store(place, active.to(out.dtype.element_ty), mask=inside)


def activation_name(module: nn.Module) -> str | None:
    """Returns the activation of a feed-forward as `gate` takes it; None if there is no kernel for it."""
    return ACTIVATION_NAMES.get(type(module).__name__)


def prepare(rotary: Tensor, positions: Tensor, slots: Tensor, mask: object) -> Tensor:
    """Returns the rotary table as `split_heads` takes it: the kernels look positions and slots up themselves."""
    return rotary


def _tile(tokens: int, tiles: tuple[tuple[int, int], ...]) -> int:
    return next((tile for most, tile in tiles if tokens <= most), LARGEST_TILE)


def _stages(most: int, b: Tensor | None, rank: int, columns: int) -> int:
    """Returns `most`, or less if the `b` of two products would take too much shared memory."""
    if b is None:
        return 1
    return max(1, min(most, STAGE_BYTES // (2 * power_of_two(rank, 16) * columns * b.element_size())))


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _row_stride(matrix: Tensor | None) -> int:
    return 0 if matrix is None else matrix.stride(0)


def add_norm(
    stream: Tensor,  # [tokens, hidden] float32: the residual, changed in place
    added: Tensor | None,  # [tokens, hidden + H] float32: a product to add, and its h; None: nothing to add
    weight: Tensor,  # [hidden]
    epsilon: float,
    slots: Tensor,  # [tokens] int64
    b: Tensor | None,  # [num_slots * rank, hidden]; None: no adapters
    rank: int,
    scale: float,
    out: Tensor | None = None,  # [tokens, hidden]; None: it is allocated
) -> Tensor:
    """Adds a product with its adapters to the residual stream; returns the norm of the sum.

    The adapters are added by tiles first, in a launch of their own, and the norm is computed row by row. Bytes for each
    token: the row read and written twice, `added` read, `out` written; `b` is read once a tile (`_adapters`), from the
    L2 cache. `h` is rounded to the type of `b`, as the trainer rounds it.
    """
    tokens, hidden = stream.shape
    out = torch.empty_like(stream, dtype=weight.dtype) if out is None else out
    if b is not None and added is not None:
        tile = _tile(tokens, TOKEN_TILES)
        _add_kernel[(_blocks(tokens, tile), _blocks(hidden, COLUMNS))](
            stream, added, slots, b, tokens, scale, stream.stride(0), added.stride(0), hidden, b.stride(0),
            b.shape[0] // rank, rank, power_of_two(rank, 16), tile, COLUMNS, _stages(STAGES, b, rank, COLUMNS),
            num_warps=TILE_WARPS,
        )  # fmt: skip
    block = power_of_two(hidden)
    _add_norm_kernel[(tokens,)](
        stream, added, weight, out, epsilon, stream.stride(0), _row_stride(added), out.stride(0), hidden, block,
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return out


def split_heads(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * size + H], with the biases of the layers, if they have any
    heads: int,
    kv_heads: int,
    size: int,
    q_weight: Tensor | None,  # [size]; None: q is not normalized
    k_weight: Tensor | None,
    epsilon: float,
    cos_sin: Tensor,  # [positions, 2 * size]
    positions: Tensor,  # [tokens] int64
    slots: Tensor,  # [tokens] int64
    bs: tuple[Tensor | None, Tensor | None, Tensor | None] | None,  # of q, k, v; a layer without adapters: None
    rank: int,
    scale: float,
    write_slots: Tensor,  # [tokens] int64
    keys: Tensor,  # [cache slots, kv_heads, size]
    values: Tensor,
    q_out: Tensor | None = None,  # [tokens, heads, size]; None: it is allocated
) -> Tensor:
    """Completes q, k and v: adapters, norms of heads, rotary embedding. Writes k and v to the cache and returns q.

    One program for each head of a tile of tokens. Bytes: `qkv` read and as much written; `b` is read once a tile
    (`_adapters`), from the L2 cache.
    """
    tokens, tile, half = qkv.shape[0], _tile(qkv.shape[0], TOKEN_TILES), power_of_two(size // 2, 16)
    q_out = qkv.new_empty(tokens, heads, size) if q_out is None else q_out
    b_q, b_k, b_v = bs or (None, None, None)
    one = next((b for b in (b_q, b_k, b_v) if b is not None), None)
    num_slots = 0 if one is None else one.shape[0] // rank
    _split_heads_kernel[(_blocks(tokens, tile), heads + 2 * kv_heads)](
        qkv, q_weight, k_weight, cos_sin, positions, slots, b_q, b_k, b_v, write_slots, keys, values, q_out, tokens,
        epsilon, scale, qkv.stride(0), heads, kv_heads, size, cos_sin.stride(0), q_out.stride(0), q_out.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), _row_stride(b_q), _row_stride(b_k),
        _row_stride(b_v), num_slots, rank, power_of_two(rank, 16), tile, half, _stages(STAGES, one, rank, half),
        num_warps=TILE_WARPS,
    )  # fmt: skip
    return q_out


def gate(
    gate_up: Tensor,  # [tokens, 2 * width + H]
    width: int,
    activation: str,  # one of `ACTIVATIONS`
    slots: Tensor,  # [tokens] int64
    bs: tuple[Tensor | None, Tensor | None] | None,  # of gate and up; a layer without adapters: None
    rank: int,
    scale: float,
    out: Tensor | None = None,  # [tokens, width]; None: it is allocated
) -> Tensor:
    """Returns `activation(gate) * up`, both with their adapters.

    One program for each tile of tokens and columns. Bytes: `gate_up` read, half of it written (9 MB at 256 tokens and
    width 6,144); `b` is read once a tile (`_adapters`), from the L2 cache. Measured on an H200 with four slots: about
    2.5 times the time of the bytes (10.7 us at 512 tokens and width 4,864, 28 us at 1,536).
    """
    check_activation(activation)
    tokens, tile = gate_up.shape[0], _tile(gate_up.shape[0], GATE_TILES)
    out = gate_up.new_empty(tokens, width) if out is None else out
    b_gate, b_up = bs or (None, None)
    one = b_up if b_gate is None else b_gate
    num_slots = 0 if one is None else one.shape[0] // rank
    _gate_kernel[(_blocks(tokens, tile), _blocks(width, COLUMNS))](
        gate_up, slots, b_gate, b_up, out, tokens, scale, gate_up.stride(0), out.stride(0), width, activation,
        _row_stride(b_gate), _row_stride(b_up), num_slots, rank, power_of_two(rank, 16), tile, COLUMNS,
        _stages(GATE_STAGES, one, rank, COLUMNS), num_warps=TILE_WARPS,
    )  # fmt: skip
    return out


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` is `{activation}`: a kernel knows {', '.join(f'`{a}`' for a in ACTIVATIONS)}")
