"""Weights on a cluster: put into Ray's object store once, pulled once by every node that serves them.

What travels between the parts of a run is a `WeightsHandle`: the four facts about a version, and where it is. Whoever
calls the task that returns an object owns it, so weights that the driver asks a trainer for outlive that trainer,
though they never pass through the driver: rank 0 writes the file of a version too. An object dies with the node that
holds its only copy, and with its owner; `renew` then puts the version again, from the file that made it durable, or has
the trainer hand it over again while it is the version that it holds.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError

from stretto.checksums import checksum
from stretto.errors import LostObjectError, StrettoError
from stretto.types import Weights

log = logging.getLogger(__name__)

FETCH_S = 120.0
_SHAPED = tuple[str, tuple[int, ...], NDArray[np.uint8]]


def flat(tensor: torch.Tensor) -> _SHAPED:
    """A tensor as its type, its shape and its bytes, which Ray moves and maps without copying them again."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def shaped(value: _SHAPED) -> torch.Tensor:
    """The tensor again, over the same memory: where that is the object store's, it must not be written to."""
    dtype, shape, data = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`Weights` as they lie in the object store."""

    version: int
    kind: Literal["lora", "full"]
    tensors: Mapping[str, _SHAPED]
    checksum: str
    scale: float

    @classmethod
    def pack(cls, weights: Weights) -> PackedWeights:
        tensors = {name: flat(tensor) for name, tensor in weights.tensors.items()}
        return cls(weights.version, weights.kind, tensors, weights.checksum, weights.scale)

    def unpack(self) -> Weights:
        """The weights over the memory that they lie in; like all `Weights` they are read and never changed."""
        tensors = {name: shaped(value) for name, value in self.tensors.items()}
        return Weights(self.version, self.kind, tensors, self.checksum, self.scale)


class Origin(Protocol):
    """Whoever made the weights of a handle, for the driver."""

    def store(self, handle: WeightsHandle, folder: Path) -> bool:
        """Write them where they are, with `write_file`; False where whoever made them is gone. Blocks."""
        ...

    async def again(self, handle: WeightsHandle) -> Any:
        """A reference to the same weights; `LostObjectError` where they cannot be had any more."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class WeightsHandle:
    """The weights of one version wherever they are. The object lives while a handle to it does.

    A copy that was sent to another process has no `origin`.
    """

    version: int
    kind: Literal["lora", "full"]
    checksum: str
    scale: float
    ref: Any  # of a `PackedWeights`; another one after it was renewed
    origin: Origin | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightsHandle, (self.version, self.kind, self.checksum, self.scale, self.ref)

    @classmethod
    def put(cls, weights: Weights) -> WeightsHandle:
        """Put weights into the object store of this node. Blocks for a copy."""
        ref = ray.put(PackedWeights.pack(weights))
        return cls(weights.version, weights.kind, weights.checksum, weights.scale, ref)

    def store(self, folder: Path) -> bool:
        """Have whoever made them write the file of this version. Blocks; not for the loop's thread."""
        return self.origin is not None and self.origin.store(self, folder)

    async def again(self) -> None:
        """Have the object made anew; `LostObjectError` where nobody has the weights any more."""
        broken = self.ref
        if self.origin is None:
            raise LostObjectError(f"nobody has version {self.version} any more")
        ref = await self.origin.again(self)
        if self.ref is broken:
            self.ref = ref

    def fetch(self, timeout_s: float = FETCH_S) -> Weights:
        """The weights themselves, in this process. Blocks until they are on this node; not for the loop's thread."""
        try:
            packed: PackedWeights = ray.get(self.ref, timeout=timeout_s)
        except RayError as error:
            raise LostObjectError(f"version {self.version} cannot be fetched: {type(error).__name__}") from error
        return packed.unpack()

    async def fetch_soon(self, timeout_s: float = FETCH_S) -> Weights:
        """`fetch` for an event loop."""
        packed: PackedWeights = await pulled(self.ref, timeout_s, f"version {self.version}")
        return packed.unpack()


async def pulled(ref: Any, timeout_s: float, what: str) -> Any:
    """An object, once it is on this node; `LostObjectError` where it is nowhere, or does not come in time."""

    async def get() -> Any:
        return await ref

    try:
        return await asyncio.wait_for(get(), timeout_s)
    except (RayError, TimeoutError) as error:
        raise LostObjectError(f"{what} is not to be had: {type(error).__name__}") from error


class WeightsStore:
    """The versions of a run in the object store. For the driver; it keeps nothing alive itself."""

    def __init__(
        self,
        recover: Callable[[WeightsHandle], Weights | None] | None = None,
        notice: Callable[[str], None] = log.warning,
    ) -> None:
        """`recover` reads a version from where it is durable, if it is; it is called in a thread.

        `notice` is told, in words, of every version that is put again.
        """
        self.renewed = 0  # how often a version was put again
        self._recover = recover
        self._notice = notice
        self._lock = asyncio.Lock()

    async def handle(self, weights: Weights | WeightsHandle) -> WeightsHandle:
        """The handle of a version; weights that have none are put into the object store."""
        if isinstance(weights, WeightsHandle):
            return weights
        return await asyncio.to_thread(WeightsHandle.put, weights)

    async def renew(self, handle: WeightsHandle, broken: Any, why: StrettoError) -> None:
        """Put a version again of which the copy `broken` is lost or damaged.

        Where there is no whole one, raises `why` of a damaged one, and `LostObjectError` otherwise: that is no fault of
        whoever asked for it.

        Everybody who holds the handle uses the new copy from then on.
        """
        async with self._lock:
            if handle.ref is not broken:
                return  # somebody else has done it
            self._notice(f"version {handle.version} is put into the object store again: {why}")
            ref = await asyncio.to_thread(self._put_again, handle)
            if ref is not None:
                handle.ref = ref
            else:
                await self._take_again(handle, why)
            self.renewed += 1

    async def _take_again(self, handle: WeightsHandle, why: StrettoError) -> None:
        try:
            await handle.again()
        except LostObjectError as lost:
            if not isinstance(why, LostObjectError):
                raise why from lost
            raise LostObjectError(
                f"version {handle.version} cannot be had any more ({why}; {lost}); go on with `--resume`"
            ) from why

    def _put_again(self, handle: WeightsHandle) -> Any:
        """A reference to a whole copy, or None. The one that is here first: a pull may have damaged another node's."""
        for read in (WeightsHandle.fetch, self._recover):
            try:
                weights = None if read is None else read(handle)
            except (StrettoError, OSError) as error:
                log.warning("version %d: %s", handle.version, error)
                continue
            if weights is not None and checksum(weights.tensors, weights.scale) == handle.checksum:
                return ray.put(PackedWeights.pack(weights))
        return None


@dataclass(frozen=True, slots=True)
class KvReference:
    """The KV of a suspended trajectory, left on the node where it was made until the next instance pulls it."""

    ref: Any
    nbytes: int
