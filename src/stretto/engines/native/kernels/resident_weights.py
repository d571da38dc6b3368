"""The resident tensors of a version, in the memory that a forward reads: copied and confirmed in two launches.

An adapter version is hundreds of small tensors, and a launch for each would stall decoding for many steps. A table on
the device, made once a slot, has the address and strides of each tensor; a program takes a block of one tensor. The
first kernel copies the values that have arrived. The second folds the resident values, as `stretto.models.checksums`
defines it. Both see a tensor in the order in which it was received, whatever its layout in memory.

Bytes: read and written by the copy, read by the fold; 105 MB for rank 16 on all layers of Qwen3-1.7B. Vectors of `B`
are strided, so expect a third of the bandwidth there: about 0.1 ms in all.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are in capitals

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.models.checksums import ODD, all_finite, checksum, description, digest
from stretto.models.triton_jit import kernel, tl

BLOCK = 4_096  # values a program
WARPS = 8
# Of a tensor in the table: address, strides of matrices, rows and columns, rows, columns, values, and the place of its
# first value in the fold. A matrix is one matrix.
FIELDS = 8
# The bits of the exponent: a value is not finite if all of them are set.
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
INTEGERS = {2: torch.int16, 4: torch.int32}


class Received(NamedTuple):
    """The result of a copy: the checksum of the resident tensors, which is valid only if all values are finite."""

    checksum: str
    finite: bool


class Resident(Protocol):
    """The memory of the tensors of one slot."""

    names: tuple[str, ...]

    def receive(self, tensors: Mapping[str, Tensor], scale: float) -> Received:
        """Copies tensors of these names and of the expected types and shapes; returns their checksum in the slot.

        A value that is not finite is never stored: a forward may read the slot before it is emptied again.
        """
        ...


class PlainResident:
    """Copies and confirms in plain torch, on any device."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self.names = tuple(views)
        self._views = dict(views)

    def receive(self, tensors: Mapping[str, Tensor], scale: float) -> Received:
        if not all_finite([tensors[name] for name in self.names]):
            return Received("", finite=False)
        torch._foreach_copy_(list(self._views.values()), [tensors[name] for name in self.names])
        return Received(checksum(self._views, scale), finite=True)


class DeviceResident:
    """Copies and confirms by kernels, on a stream beside the steps of an engine; the caller waits for it alone.

    `stream` is None in Triton's interpreter. The views are matrices, or rows of them, of one type in `EXPONENTS`.
    """

    def __init__(self, views: Mapping[str, Tensor], stream: torch.cuda.Stream | None) -> None:
        assert fits(views.values())
        self.names = tuple(views)
        first = next(iter(views.values()))
        self._device, self._dtype, self._stream = first.device, first.dtype, stream
        self._described = description(views)
        lengths = {name: view.numel() for name, view in views.items()}
        starts, at = {}, 0
        for name in sorted(views):  # the order in which a checksum counts values
            starts[name], at = at, at + lengths[name]
        table = [
            (view.data_ptr(), *(0, *view.stride())[-3:], *view.shape[-2:], lengths[name], starts[name])
            for name, view in views.items()
        ]
        counts = [-(-length // BLOCK) for length in lengths.values()]
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        with torch.cuda.stream(stream):  # not the caller's current one
            self._table = torch.tensor(table, dtype=torch.int64, device=self._device)
            self._blocks = torch.from_numpy(np.stack([owners, within])).to(self._device)
            self._like = torch.empty(1, dtype=INTEGERS[first.element_size()], device=self._device)
            pinned = self._device.type == "cuda"
            # The addresses of the tensors that arrive; and the fold, with the number of values that are not finite.
            self._host_sources = torch.empty(len(table), dtype=torch.int64, pin_memory=pinned)
            self._sources = torch.empty_like(self._host_sources, device=self._device)
            self._host_found = torch.empty(2, dtype=torch.int64, pin_memory=pinned)
            self._found = torch.empty_like(self._host_found, device=self._device)

    def receive(self, tensors: Mapping[str, Tensor], scale: float) -> Received:
        with torch.cuda.stream(self._stream):
            sources = self._here([tensors[name] for name in self.names])
            self._host_sources.copy_(torch.tensor([source.data_ptr() for source in sources]))
            self._sources.copy_(self._host_sources, non_blocking=True)
            self._found.zero_()
            grid = (self._blocks.shape[1],)
            exponent = EXPONENTS[self._dtype]
            _copy_kernel[grid](
                self._sources, self._table, self._blocks, self._found, self._like, grid[0], FIELDS=FIELDS,
                EXPONENT=exponent, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            _fold_kernel[grid](
                self._table, self._blocks, self._found, self._like, grid[0], FIELDS=FIELDS, MULTIPLIER=ODD,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            self._host_found.copy_(self._found, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # the sources are in use until then
        fold, broken = self._host_found.tolist()
        return Received(digest(self._described, scale, [fold]), finite=not broken)

    def _here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors on the device, contiguous; those of a host come in one transfer."""
        if any(tensor.device != self._device for tensor in tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._device)
            return list(flat.split_with_sizes([tensor.numel() for tensor in tensors]))
        return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]


def fits(views: Iterable[Tensor]) -> bool:
    """True if `DeviceResident` takes these views."""
    shown = list(views)
    one_type = len({view.dtype for view in shown}) == 1 and shown[0].dtype in EXPONENTS
    return one_type and all(view.dim() in (2, 3) and view.numel() < 1 << 31 for view in shown)


@kernel()
def _block(table, blocks, like, num_blocks, FIELDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a program's tensor, its values' indices in it, a mask of the valid ones, and their addresses."""
    owner = tl.load(blocks + tl.program_id(0))
    index = tl.load(blocks + num_blocks + tl.program_id(0)).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    entry = table + owner * FIELDS
    rows, columns = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    row = index // columns
    matrix = row // rows
    place = (row - matrix * rows) * tl.load(entry + 2) + (index - row * columns) * tl.load(entry + 3)
    place += matrix * tl.load(entry + 1)
    return owner, index, index < tl.load(entry + 6), tl.load(entry).to(like.dtype) + place


@kernel("num_blocks")
def _copy_kernel(  # type: ignore[no-untyped-def]
    sources, table, blocks, found, like, num_blocks, FIELDS: tl.constexpr, EXPONENT: tl.constexpr, BLOCK: tl.constexpr
):
    owner, index, inside, place = _block(table, blocks, like, num_blocks, FIELDS, BLOCK)
    value = tl.load(tl.load(sources + owner).to(like.dtype) + index, mask=inside, other=0)
    finite = (value & EXPONENT) != EXPONENT
    tl.store(place, tl.where(finite, value, 0), mask=inside)
    broken = tl.sum((~finite).to(tl.int64), 0)
    if broken > 0:
        tl.atomic_add(found + 1, broken)


@kernel("num_blocks")
def _fold_kernel(  # type: ignore[no-untyped-def]
    table, blocks, found, like, num_blocks, FIELDS: tl.constexpr, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr
):
    owner, index, inside, place = _block(table, blocks, like, num_blocks, FIELDS, BLOCK)
    value = tl.load(place, mask=inside, other=0).to(tl.int64)
    term = (value + 1) * MULTIPLIER * (2 * (tl.load(table + owner * FIELDS + 7) + index) + 1)
    tl.atomic_add(found, tl.sum(tl.where(inside, term ^ (term >> 32), 0), 0))
