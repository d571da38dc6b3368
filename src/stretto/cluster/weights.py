"""Weights and KV in Ray's object store: put there once, pulled once by every machine that needs them.

The parts of a run pass a `RayWeightsRef` around: version, kind, checksum and scale of the weights, and a reference to
the object. The driver calls the trainer's ranks, so it owns the objects that they return: weights outlive the rank that
made them, although they never pass through the driver. An object dies with its owner, and with the machine that holds
its only copy. `RayWeightsRef.recreate` then puts the version again: from a copy that is still whole, from the version
file, or from the trainer while that is at this version.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError

from stretto.errors import LostObjectError, StrettoError
from stretto.models.checksums import checksum
from stretto.types import KVRef, Probe, Weights, WeightsRef

log = logging.getLogger(__name__)

FETCH_S = 120.0
FlatTensor = tuple[str, tuple[int, ...], NDArray[np.uint8]]
"""A tensor as its type, its shape and its bytes, which Ray moves and maps without another copy."""


def flatten(tensor: torch.Tensor) -> FlatTensor:
    """Returns the tensor in the form in which it lies in the object store."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def unflatten(value: FlatTensor) -> torch.Tensor:
    """Returns the tensor over the same memory. It must not be written to if that is the object store's."""
    dtype, shape, data = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`Weights` as they lie in the object store."""

    version: int
    kind: Literal["lora", "full"]
    tensors: Mapping[str, FlatTensor]
    checksum: str
    scale: float
    probe: Probe | None = None

    @classmethod
    def pack(cls, weights: Weights) -> PackedWeights:
        tensors = {name: flatten(tensor) for name, tensor in weights.tensors.items()}
        return cls(weights.version, weights.kind, tensors, weights.checksum, weights.scale, weights.probe)

    def unpack(self) -> Weights:
        """Returns the weights over the memory that they lie in. Like all `Weights` they are read and never changed."""
        tensors = {name: unflatten(value) for name, value in self.tensors.items()}
        return Weights(self.version, self.kind, tensors, self.checksum, self.scale, self.probe)


class WeightsProducer(Protocol):
    """The trainer that made the weights of a reference, as the driver reaches it."""

    def store(self, weights: RayWeightsRef, folder: Path) -> bool:
        """Writes the version file where the weights are. Returns False if the producer is gone. Blocks."""
        ...

    async def produce_again(self, weights: RayWeightsRef) -> Any:
        """Returns a reference to another copy of the same weights. Raises `LostObjectError` if it has them no more."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class RayWeightsRef:
    """The `WeightsRef` of a cluster. The object lives while a reference to it does.

    A copy that was sent to another process can be fetched there, but not stored or recreated.
    """

    version: int
    kind: Literal["lora", "full"]
    checksum: str
    scale: float
    ref: Any  # of a `PackedWeights`; another one after it was recreated
    failed_ref: Any = None  # the last one that was found to be lost or damaged
    producer: WeightsProducer | None = None
    weights_store: WeightsStore | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayWeightsRef, (self.version, self.kind, self.checksum, self.scale, self.ref)

    @classmethod
    def put(cls, weights: Weights) -> RayWeightsRef:
        """Puts weights into the object store of this machine. Blocks for a copy."""
        ref = ray.put(PackedWeights.pack(weights))
        return cls(weights.version, weights.kind, weights.checksum, weights.scale, ref)

    def store(self, folder: Path) -> bool:
        return self.producer is not None and self.producer.store(self, folder)

    def fetch(self, timeout_s: float = FETCH_S) -> Weights:
        ref = self.ref
        try:
            packed: PackedWeights = ray.get(ref, timeout=timeout_s)
        except RayError as error:
            self.failed_ref = ref
            raise LostObjectError(f"version {self.version} cannot be fetched: {type(error).__name__}") from error
        return packed.unpack()

    async def fetch_async(self, timeout_s: float = FETCH_S) -> Weights:
        """Does the same as `fetch` without blocking the event loop."""
        packed: PackedWeights = await pull(self.ref, timeout_s, f"version {self.version}")
        return packed.unpack()

    async def recreate(self) -> None:
        """Puts the version into the object store again. Every holder of this reference uses the new copy from then on.

        Returns at once if somebody else has replaced the copy that failed.
        """
        async with self._lock:
            if self.ref is not self.failed_ref:
                return
            self.ref = await (self.weights_store or WeightsStore()).another_copy(self)


async def pull(ref: Any, timeout_s: float, name: str) -> Any:
    """Returns an object once it is on this machine. Raises `LostObjectError` if it is lost, or late."""

    async def get() -> Any:
        return await ref

    try:
        return await asyncio.wait_for(get(), timeout_s)
    except (RayError, TimeoutError) as error:
        raise LostObjectError(f"{name} cannot be fetched: {type(error).__name__}") from error


class WeightsStore:
    """Puts versions into the object store, and puts lost ones there again. For the driver; it keeps nothing alive."""

    def __init__(
        self,
        read_file: Callable[[RayWeightsRef], Weights | None] | None = None,
        notice: Callable[[str], None] = log.warning,
    ) -> None:
        """`read_file` returns a version from its file, or None; it is called in a thread.

        `notice` gets a sentence for every version that is put again.
        """
        self.renewed = 0  # how often a version was put again
        self._read_file = read_file
        self._notice = notice

    def put(self, weights: Weights) -> RayWeightsRef:
        """Puts weights into the object store of this machine. Blocks for a copy."""
        return self.own(RayWeightsRef.put(weights))

    def own(self, weights: RayWeightsRef, producer: WeightsProducer | None = None) -> RayWeightsRef:
        """Makes a reference one that can be recreated, and returns it."""
        weights.weights_store, weights.producer = self, producer
        return weights

    async def reference(self, weights: Weights | WeightsRef) -> RayWeightsRef:
        """Returns the reference of a version. Weights that have none are put into the object store."""
        if isinstance(weights, RayWeightsRef):
            return weights
        fetched = weights if isinstance(weights, Weights) else await asyncio.to_thread(weights.fetch)
        return await asyncio.to_thread(self.put, fetched)

    async def another_copy(self, weights: RayWeightsRef) -> Any:
        """Returns a reference to another, whole copy of a version. Raises `LostObjectError` if there is none."""
        ref = await asyncio.to_thread(self._copy_again, weights)
        if ref is None and weights.producer is not None:
            ref = await weights.producer.produce_again(weights)
        if ref is None:
            raise LostObjectError(f"no whole copy of version {weights.version} is left, and its trainer is gone")
        self.renewed += 1
        self._notice(f"version {weights.version} was put into the object store again: its copy was lost or damaged")
        return ref

    def _copy_again(self, weights: RayWeightsRef) -> Any:
        """Returns a reference to a new copy, from the copy on this machine or from the file; None if neither is whole.

        The copy on this machine comes first: a transfer may have damaged the copy on another machine alone.
        """
        for read in (RayWeightsRef.fetch, self._read_file):
            try:
                found = None if read is None else read(weights)
            except (StrettoError, OSError) as error:
                log.warning("version %d: %s", weights.version, error)
                continue
            if found is not None and checksum(found.tensors, found.scale) == weights.checksum:
                return ray.put(PackedWeights.pack(found))
        return None


@dataclass(frozen=True, slots=True)
class RayKVRef(KVRef):
    """The KV of a suspended trajectory, left on the machine where it was made until the next instance pulls it."""

    ref: Any
