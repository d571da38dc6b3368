"""Copies of keys and values for the sequences that continue a shared prefix, and the sums of their gradients.

On CUDA each direction is one kernel for keys and values together: an update of a small model is bound by the number of
launches. Everywhere else it is a few operations of torch, the reference. Sums are in `wide_type`, in a fixed order, and
rounded once.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.models.float32_products import wide_type
from stretto.models.triton_jit import kernel, power_of_two, tl
from stretto.models.varlen_layout import NO_COPY, Copies

TILE = 2_048  # elements that a program has of keys, and of values
WARPS = 4


@kernel("keys")
def _expand_kernel(  # type: ignore[no-untyped-def]
    key, value, copies, key_out, value_out, keys, key_stride, value_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (place < keys)[:, None] & (column < WIDTH)
    source = tl.load(copies + place, mask=place < keys, other=0)[:, None]
    to = place.to(tl.int64)[:, None] * WIDTH + column
    tl.store(key_out + to, tl.load(key + source * key_stride + column, mask=inside), mask=inside)
    tl.store(value_out + to, tl.load(value + source * value_stride + column, mask=inside), mask=inside)


@kernel("keys", "tokens", "most")
def _reduce_kernel(  # type: ignore[no-untyped-def]
    key_grad, value_grad, copies, key_out, value_out, keys, tokens, most, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens)[:, None] & (column < WIDTH)
    places = copies + keys
    rows = places + tokens
    table = rows + tokens
    place = tl.load(places + token, mask=token < tokens, other=0)
    row = tl.load(rows + token, mask=token < tokens, other=-1)
    at = place[:, None] * WIDTH + column
    key_sum = tl.load(key_grad + at, mask=inside, other=0.0).to(tl.float32)
    value_sum = tl.load(value_grad + at, mask=inside, other=0.0).to(tl.float32)
    if tl.max(row, 0) >= 0:
        offset = place - tl.load(table + row * most, mask=row >= 0, other=0)  # of the token in its prefix
        for copy in range(1, most):
            first = tl.load(table + row * most + copy, mask=row >= 0, other=-1)
            exists = inside & (first >= 0)[:, None]
            at = (first + offset)[:, None] * WIDTH + column
            key_sum += tl.load(key_grad + at, mask=exists, other=0.0).to(tl.float32)
            value_sum += tl.load(value_grad + at, mask=exists, other=0.0).to(tl.float32)
    to = token.to(tl.int64)[:, None] * WIDTH + column
    tl.store(key_out + to, key_sum.to(key_out.dtype.element_ty), mask=inside)
    tl.store(value_out + to, value_sum.to(value_out.dtype.element_ty), mask=inside)


def _tiles(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns the grid of programs over so many rows of `width` elements, and the constants of a kernel."""
    columns = power_of_two(width)
    block = max(1, TILE // columns)
    return (-(-rows // block),), {"WIDTH": width, "ROWS": block, "COLUMNS": columns, "num_warps": WARPS}


def _in_rows(states: Tensor) -> Tensor:
    """Returns [n, heads, size] such that a row is one piece of memory; rows may lie apart."""
    _, heads, size = states.shape
    return states if states.stride()[1:] == (size, 1) or heads == 1 == states.stride(2) else states.contiguous()


def expand_by_kernel(key: Tensor, value: Tensor, copies: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Does the same as `expanded`, in one kernel."""
    key, value = _in_rows(key), _in_rows(value)
    shape = key.shape[1:]
    made = tuple(torch.empty((num_keys, *shape), dtype=each.dtype, device=each.device) for each in (key, value))
    grid, constants = _tiles(num_keys, shape.numel())
    _expand_kernel[grid](key, value, copies, made[0], made[1], num_keys, key.stride(0), value.stride(0), **constants)
    return made[0], made[1]


def reduce_by_kernel(
    key_grad: Tensor, value_grad: Tensor, tokens: int, copies: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Does the same as `reduced`, in one kernel. The gradients are contiguous."""
    num_keys, *shape = key_grad.shape
    made = tuple(torch.empty((tokens, *shape), dtype=each.dtype, device=each.device) for each in (key_grad, value_grad))
    grid, constants = _tiles(tokens, math.prod(shape))
    _reduce_kernel[grid](key_grad, value_grad, copies, made[0], made[1], num_keys, tokens, most, **constants)
    return made[0], made[1]


def expanded(key: Tensor, value: Tensor, copies: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values [T, heads, size] of packed tokens as those [K, heads, size] that sequences see.

    `copies` and `num_keys` are those of the layout.
    """
    if key.is_cuda:
        return expand_by_kernel(key, value, copies, num_keys)
    sources = copies[:num_keys]
    return key.index_select(0, sources), value.index_select(0, sources)


def reduced(key_grad: Tensor, value_grad: Tensor, tokens: int, copies: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients [T, heads, size] of packed tokens: the sums over the copies [K, heads, size] of each."""
    if key_grad.is_cuda:
        return reduce_by_kernel(key_grad, value_grad, tokens, copies, most)
    parts = Copies.of(copies, tokens, len(key_grad), most)
    return _reduced(key_grad, parts), _reduced(value_grad, parts)


def _reduced(grads: Tensor, copies: Copies) -> Tensor:
    result, shared = grads.index_select(0, copies.places), copies.rows >= 0
    rows = copies.table[copies.rows[shared]]  # [tokens of all prefixes, most]
    offsets = copies.places[shared] - rows[:, 0]
    total = torch.zeros((len(rows), *grads.shape[1:]), dtype=wide_type(grads.dtype))
    for first in rows.unbind(1):
        exists = first != NO_COPY
        total[exists] += grads[(first + offsets)[exists]]
    result[shared] = total.to(grads.dtype)
    return result
