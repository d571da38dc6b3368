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

# To be tuned on a device. Tokens that a program of `gate` and `split_heads` computes: (up to so many tokens, so many).
# A program reads the `b` of each slot among its tokens once, so large tiles read less and small ones fill more SMs.
TOKEN_TILES: tuple[tuple[int, int], ...] = ((128, 16), (512, 32))
LARGEST_TILE = 64
GATE_COLUMNS = 128
ADD_COLUMNS = 128
TILE_WARPS, LARGEST_TILE_WARPS = 4, 8
# Above so many tokens `add_norm` adds the adapters by tiles first, instead of row by row.
ADD_NORM_ROWS = 512
NORM_CHUNK = 16  # rows of `b` that `add_norm` may load at once, a power of two


@kernel()
def _own_adapter(  # type: ignore[no-untyped-def]
    h, b, slots, inside_rows, columns, inside_columns, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns `h_own @ b_own` [TILE, COLUMNS] in float32; `h` [TILE] points at each token's column of the first slot.

    The product with each slot present is computed for all tokens of the tile, and kept for those of that slot. A row of
    a product depends on its own row of `h` alone, so a token's bits do not depend on its neighbours.
    """
    ranks = tl.arange(0, RANK_PADDED)
    own = h[:, None] + slots[:, None] * RANK + ranks[None, :]
    own = tl.load(own, mask=inside_rows[:, None] & (ranks < RANK)[None, :], other=0.0).to(b.dtype.element_ty)
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    inside = (ranks < RANK)[:, None] & inside_columns[None, :]
    for slot in range(NUM_SLOTS):
        mine = (slots == slot) & inside_rows
        if tl.max(mine.to(tl.int32), 0) > 0:
            factor = tl.load(b + (slot * RANK + ranks)[:, None] * B_STRIDE + columns[None, :], mask=inside, other=0.0)
            product = tl.dot(own, factor, input_precision="ieee")
            total = tl.where(mine[:, None], product, total)
    return total


@kernel()
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    stream, added, weight, slots, b, out, epsilon, scale, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, B_STRIDE: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    value = tl.load(stream + row * STRIDE + columns, mask=inside, other=0.0)
    if added is not None:
        start = added + row * ADDED_STRIDE
        value += tl.load(start + columns, mask=inside, other=0.0)
        if b is not None:
            first = tl.load(slots + row) * RANK
            adapted = tl.zeros((BLOCK,), tl.float32)
            for start_rank in range(0, RANK, CHUNK):
                ranks = start_rank + tl.arange(0, CHUNK)
                h = tl.load(start + HIDDEN + first + ranks, mask=ranks < RANK, other=0.0)
                h = h.to(b.dtype.element_ty).to(tl.float32)
                factor = b + (first + ranks)[:, None] * B_STRIDE + columns[None, :]
                factor = tl.load(factor, mask=(ranks < RANK)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                adapted += tl.sum(h[:, None] * factor, 0)
            value += scale * adapted
        tl.store(stream + row * STRIDE + columns, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + epsilon)
    value = value * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUT_STRIDE + columns, value.to(out.dtype.element_ty), mask=inside)


@kernel("tokens")
def _add_kernel(  # type: ignore[no-untyped-def]
    stream, added, slots, b, tokens, scale, STRIDE: tl.constexpr, ADDED_STRIDE: tl.constexpr, HIDDEN: tl.constexpr,
    B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_rows, inside_columns = rows < tokens, columns < HIDDEN
    inside = inside_rows[:, None] & inside_columns[None, :]
    slot = tl.load(slots + rows, mask=inside_rows, other=0)
    h = added + rows.to(tl.int64) * ADDED_STRIDE + HIDDEN
    adapted = _own_adapter(h, b, slot, inside_rows, columns, inside_columns, B_STRIDE, NUM_SLOTS, RANK, RANK_PADDED,
                           TILE, COLUMNS)  # fmt: skip
    place = stream + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + scale * adapted, mask=inside)


@kernel()
def _adapted(  # type: ignore[no-untyped-def]
    start, h, b, slots, inside_rows, columns, inside_columns, scale, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns some columns of a layer's output with its adapter added, float32; zero outside."""
    inside = inside_rows[:, None] & inside_columns[None, :]
    value = tl.load(start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        added = _own_adapter(h, b, slots, inside_rows, columns, inside_columns, B_STRIDE, NUM_SLOTS, RANK, RANK_PADDED,
                             TILE, COLUMNS)  # fmt: skip
        value += scale * added
    return value


@kernel()
def _head(  # type: ignore[no-untyped-def]
    start, h, b, slots, own, head, weight, cos_sin, position, place, epsilon, scale, ROTATED: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, SIZE: tl.constexpr, B_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Computes one head of the tokens of a tile, as two halves, because the rotary embedding pairs their columns."""
    halves = tl.arange(0, HALF_PADDED)
    whole = halves < SIZE // 2
    inside = own[:, None] & whole[None, :]
    columns = head * SIZE + halves
    first = _adapted(start, h, b, slots, own, columns, whole, scale, B_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE,
                     HALF_PADDED)  # fmt: skip
    second = _adapted(start, h, b, slots, own, columns + SIZE // 2, whole, scale, B_STRIDE, NUM_SLOTS, RANK,
                      RANK_PADDED, TILE, HALF_PADDED)  # fmt: skip
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
    RANK_PADDED: tl.constexpr, TILE: tl.constexpr, HALF_PADDED: tl.constexpr,
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
              SIZE, BQ_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED)  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        h += NUM_SLOTS * RANK
        place = keys + target.to(tl.int64) * K_STRIDE + head * K_HEAD
        _head(k_start, h, b_k, slot, own, head, k_weight, cos_sin, position, place, epsilon, scale, True, TABLE_STRIDE,
              SIZE, BK_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED)  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        h += 2 * NUM_SLOTS * RANK
        place = values + target.to(tl.int64) * V_STRIDE + head * V_HEAD
        _head(v_start, h, b_v, slot, own, head, None, cos_sin, position, place, epsilon, scale, False, TABLE_STRIDE,
              SIZE, BV_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, HALF_PADDED)  # fmt: skip


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
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, whole = rows < tokens, columns < WIDTH
    start = gate_up + rows.to(tl.int64) * STRIDE
    slot = tl.load(slots + rows, mask=own, other=0)
    gate = _adapted(start, start + 2 * WIDTH, b_gate, slot, own, columns, whole, scale, GATE_STRIDE, NUM_SLOTS, RANK,
                      RANK_PADDED, TILE, COLUMNS)  # fmt: skip
    up = _adapted(start + WIDTH, start + 2 * WIDTH + NUM_SLOTS * RANK, b_up, slot, own, columns, whole, scale,
                    UP_STRIDE, NUM_SLOTS, RANK, RANK_PADDED, TILE, COLUMNS)  # fmt: skip
    active = activate(gate, ACTIVATION)
    place = out + rows.to(tl.int64)[:, None] * OUT_STRIDE + columns[None, :]
    tl.store(place, (active * up).to(out.dtype.element_ty), mask=own[:, None] & whole[None, :])


def activation_name(module: nn.Module) -> str | None:
    """Returns the activation of a feed-forward as `gate` takes it; None if there is no kernel for it."""
    return ACTIVATION_NAMES.get(type(module).__name__)


def prepare(rotary: Tensor, positions: Tensor, slots: Tensor, mask: object) -> Tensor:
    """Returns the rotary table as `split_heads` takes it: the kernels look positions and slots up themselves."""
    return rotary


def _tile(tokens: int) -> int:
    return next((tile for most, tile in TOKEN_TILES if tokens <= most), LARGEST_TILE)


def _warps(tile: int) -> int:
    return LARGEST_TILE_WARPS if tile >= LARGEST_TILE else TILE_WARPS


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

    One program for each row, which it holds in registers. Bytes for each token: the row read and written, `added` read,
    `out` written, `rank` rows of `b` (64 KB at rank 16 and 2,048 columns) from the L2 cache. At 256 tokens these 16 MB
    bound it: about 4 us expected, 3 us without adapters. Above `ADD_NORM_ROWS` tokens the adapters are added by tiles
    in a kernel of their own. `h` is rounded to the type of `b`, as the trainer rounds it.
    """
    tokens, hidden = stream.shape
    out = torch.empty_like(stream, dtype=weight.dtype) if out is None else out
    if b is not None and added is not None and tokens > ADD_NORM_ROWS:
        tile = _tile(tokens)
        _add_kernel[(_blocks(tokens, tile), _blocks(hidden, ADD_COLUMNS))](
            stream, added, slots, b, tokens, scale, stream.stride(0), added.stride(0), hidden, b.stride(0),
            b.shape[0] // rank, rank, power_of_two(rank, 16), tile, ADD_COLUMNS, num_warps=_warps(tile),
        )  # fmt: skip
        b = None
    block, chunk = power_of_two(hidden), min(NORM_CHUNK, power_of_two(rank))
    _add_norm_kernel[(tokens,)](
        stream, added, weight, slots, b, out, epsilon, scale, stream.stride(0), _row_stride(added), out.stride(0),
        hidden, _row_stride(b), rank, chunk, block, num_warps=min(16, max(4, block // 256)),
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

    One program for each head of a tile of tokens. Bytes: `qkv` read and as much written; `b` of the slots present is
    read once a tile (2 MB each at 256 tokens, 4,096 columns and rank 16, from L2). Expected: 3 us at 256 tokens.
    """
    tokens, tile = qkv.shape[0], _tile(qkv.shape[0])
    q_out = qkv.new_empty(tokens, heads, size) if q_out is None else q_out
    b_q, b_k, b_v = bs or (None, None, None)
    one = next((b for b in (b_q, b_k, b_v) if b is not None), None)
    num_slots = 0 if one is None else one.shape[0] // rank
    _split_heads_kernel[(_blocks(tokens, tile), heads + 2 * kv_heads)](
        qkv, q_weight, k_weight, cos_sin, positions, slots, b_q, b_k, b_v, write_slots, keys, values, q_out, tokens,
        epsilon, scale, qkv.stride(0), heads, kv_heads, size, cos_sin.stride(0), q_out.stride(0), q_out.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), _row_stride(b_q), _row_stride(b_k),
        _row_stride(b_v), num_slots, rank, power_of_two(rank, 16), tile, power_of_two(size // 2, 16),
        num_warps=_warps(tile),
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
    width 6,144); `b` of the slots present is read once a tile, 8 times 0.4 MB each there, against 100 MB if every token
    read its own. Expected: 4 us at 256 tokens.
    """
    check_activation(activation)
    tokens, tile = gate_up.shape[0], _tile(gate_up.shape[0])
    out = gate_up.new_empty(tokens, width) if out is None else out
    b_gate, b_up = bs or (None, None)
    one = b_up if b_gate is None else b_gate
    num_slots = 0 if one is None else one.shape[0] // rank
    _gate_kernel[(_blocks(tokens, tile), _blocks(width, GATE_COLUMNS))](
        gate_up, slots, b_gate, b_up, out, tokens, scale, gate_up.stride(0), out.stride(0), width, activation,
        _row_stride(b_gate), _row_stride(b_up), num_slots, rank, power_of_two(rank, 16), tile, GATE_COLUMNS,
        num_warps=_warps(tile),
    )  # fmt: skip
    return out


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` is `{activation}`: a kernel knows {', '.join(f'`{a}`' for a in ACTIVATIONS)}")
