"""The checksum of weights, computed on the device where they are: the same on every device.

The tensors of one type, in the order of their names, are one row of integers `x_i`, folded into `sum t_i ^ (t_i >> 32)`
with `t_i = (x_i + 1) * (2 i + 1) * ODD`, modulo 2**64: positions matter, so an exchange of two values shows, and terms
are bent before they are added, so that changes of several values do not cancel. Only 8 bytes a type leave the device.
On a GPU a kernel reads each value once: 3.4 GB of weights should take about a millisecond.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.models.triton_jit import kernel, tl

ODD = 0x9E3779B97F4A7C1
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}  # values folded at once; on a CPU as many as its caches hold
BLOCK = 8_192  # values a program folds
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Mapping[str, Tensor], scale: float = 1.0) -> str:
    """A checksum of names, shapes, types and every bit of the values."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for name in sorted(tensors):
        by_type.setdefault(tensors[name].dtype, []).append(tensors[name].detach())
    folds = [_fold(by_type[dtype]) for dtype in sorted(by_type, key=str)]
    return digest(description(tensors), scale, [int(fold) for fold in folds])


def description(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the part of a checksum that describes tensors apart from their values."""
    each = (f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype} " for name in sorted(tensors))
    return "".join(each).encode()


def digest(described: bytes, scale: float, folds: Sequence[int]) -> str:
    """The checksum of tensors from their `description` and the fold of each type, in the order of the types' names."""
    state = hashlib.blake2b(repr(float(scale)).encode(), digest_size=16)
    state.update(described)
    for fold in folds:
        state.update(fold.to_bytes(8, "little", signed=True))
    return state.hexdigest()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """True if no value is infinite or NaN; waits for the device once for all tensors."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    parts = [torch.isfinite(part).all() for same in by_type.values() for part in _pieces(same)]
    return bool(torch.stack(parts).all()) if parts else True


def _fold(tensors: Sequence[Tensor]) -> Tensor:
    """The fold of tensors of one type, as if they were one: an integer on their device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    start = 0
    for piece in _pieces(tensors):
        values = piece.view(_VIEWS[piece.element_size()])
        if piece.is_cuda:
            fold_into(values, start, total)
        else:
            fold_into_reference(values, start, total)
        start += values.numel()
    return total


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The values in order, flat, in pieces of up to `CHUNK`: small tensors together, because each piece costs a few
    operations, large ones a part at a time, so that what is in flight stays small."""
    size = CHUNK.get(tensors[0].device.type, CHUNK["cpu"])
    gathered: list[Tensor] = []
    held = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if gathered and held + flat.numel() > size:
            yield torch.cat(gathered)
            gathered, held = [], 0
        if flat.numel() > size:
            yield from torch.split(flat, size)
        else:
            gathered.append(flat)
            held += flat.numel()
    if gathered:
        yield gathered[0] if len(gathered) == 1 else torch.cat(gathered)


def fold_into_reference(values: Tensor, start: int, total: Tensor) -> None:
    """Add the fold of integers [n] that stand at `start` in their row to `total`."""
    place = torch.arange(2 * start + 1, 2 * (start + values.numel()) + 1, 2, device=values.device)
    # Wrapping arithmetic; the multiplier spreads small integers over all 64 bits.
    terms = (values.to(torch.int64) + 1).mul_(ODD).mul_(place)
    total += (terms ^ (terms >> 32)).sum()


def fold_into(values: Tensor, start: int, total: Tensor) -> None:
    """Computes `fold_into_reference` in one launch. The order of the programs does not matter: sums wrap."""
    count = values.numel()
    _fold_kernel[(-(-count // BLOCK),)](values, total, count, start, MULTIPLIER=ODD, BLOCK=BLOCK, num_warps=8)


@kernel("count", "start")
def _fold_kernel(  # type: ignore[no-untyped-def]
    values, total, count, start, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    value = tl.load(values + index, mask=inside, other=0).to(tl.int64)
    term = (value + 1) * MULTIPLIER * (2 * (start + index) + 1)
    tl.atomic_add(total, tl.sum(tl.where(inside, term ^ (term >> 32), 0), 0))
