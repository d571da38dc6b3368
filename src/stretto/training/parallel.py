"""Ranks: processes that train one policy together, each on its share of every batch.

Every rank is given the whole batch, and decides for itself what is decided of a whole batch: the parts, the weights of
tokens, rewards, advantages. It runs its own sequences only. What they came to is brought together: values of the tokens
before advantages are made, gradients once an optimizer step, and what is measured. A gradient is a sum over sequences
whose weights are those of the whole part, so the sum over ranks is the gradient of one rank, to rounding; every rank
takes the same step with the same optimizer and holds the same state afterwards.

| when                          | what is brought together                                   |
|-------------------------------|------------------------------------------------------------|
| after each pass over a batch  | whether a rank failed: then all of them fail, none waits   |
| before advantages             | a critic's values, divergences in the reward               |
| before each optimizer step    | gradients; losses and values of tokens, for what is told   |

A rank whose share is empty takes part in all of it.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from stretto.checksums import checksum
from stretto.errors import TrainerError, TrainerLostError
from stretto.training.measures import TokenValues, joined

BUCKET = 1 << 26  # numbers that are summed over the ranks at once: a quarter of a gigabyte in float32


def shares(sizes: Sequence[int] | NDArray[np.int64], count: int) -> list[list[int]]:
    """Divide sequences over ranks: the longest first, each to the rank with the fewest tokens so far.

    Every index appears once, in its rank's order of the batch; the result depends on the arguments alone. No rank has
    more tokens than the mean and the longest sequence together. With fewer sequences than ranks some have none.
    """
    loads = [(0, rank) for rank in range(count)]
    found: list[list[int]] = [[] for _ in range(count)]
    for index in np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        found[rank].append(index)
        heapq.heappush(loads, (load + int(sizes[index]), rank))
    return [sorted(each) for each in found]


def open_meeting(host: str, port: int, *, count: int, timeout_s: float, first: bool) -> Any:
    """Where ranks find one another: made by the `first`, at a port of its own choice where `port` is 0."""
    patience = _patience(timeout_s)
    with _meeting():
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, count, is_master=first, timeout=patience, wait_for_workers=False
        )


def _patience(timeout_s: float) -> timedelta:
    return timedelta(seconds=min(timeout_s, 1e7))


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """What fails while ranks meet is a rank that is gone, or does not come: nobody can go on with this group."""
    try:
        yield
    except RuntimeError as error:
        raise TrainerLostError(f"the ranks of the trainer cannot meet: {type(error).__name__}: {error}") from error


class Ranks:
    """The ranks of one policy, seen from one of them. Made once a process.

    Every method is a meeting: all ranks call it, in the same order, with what fits together. One rank alone meets
    nobody, and nothing changes.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank = rank
        self.count = count

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        rank: int,
        count: int,
        device: torch.device,
        timeout_s: float,
        store: Any = None,  # what `open_meeting` gave to rank 0
    ) -> Ranks:
        """Meet the others where rank 0 opened; a meeting that takes longer than `timeout_s` fails.

        Numbers on a GPU travel by NCCL, everything else by gloo.
        """
        if count > 1:
            store = open_meeting(host, port, count=count, timeout_s=timeout_s, first=False) if store is None else store
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with _meeting():
                dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_patience(timeout_s))
        return cls(rank, count)

    def leave(self) -> None:
        """Meet nobody any more."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def gathered(self, value: Any) -> list[Any]:
        """What every rank gave, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with _meeting():
            dist.all_gather_object(found, value)
        return found

    @contextlib.contextmanager
    def together(self, *, passes_meet: bool = False) -> Iterator[None]:
        """Work that a rank does alone. Where it fails for one, it fails for all, once all have come to its end.

        Where passes through the model are meetings too, `passes_meet`, nobody comes there: the rank fails alone.
        """
        if self.count == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except TrainerLostError:
            raise  # there is nobody to agree with
        except Exception as raised:
            if passes_meet:
                if isinstance(raised, RuntimeError) and not isinstance(raised, torch.OutOfMemoryError):
                    raise TrainerLostError(f"a pass of all ranks failed: {raised}") from raised
                raise
            error = raised
        failures = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            try:
                raise error
            finally:
                error = None  # it holds this frame, and with it everything that the work had made
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise TrainerError(f"rank {rank} of {self.count} failed: {failure}")

    def check_same(self, tensors: Mapping[str, torch.Tensor], option: str = "model.path") -> None:
        """Raise `TrainerError` at every rank unless all of them have the same values of what `option` names."""
        if self.count > 1 and len(set(found := self.gathered(checksum(tensors)))) > 1:
            raise TrainerError(
                f"the ranks have loaded models that differ, of checksums {', '.join(found)}: give every machine the "
                f"same files of `{option}`"
            )

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over ranks, in float64."""
        if self.count == 1:
            return values
        summed = torch.from_numpy(values.astype(np.float64, copy=True))
        with _meeting():
            dist.all_reduce(summed)
        return summed.numpy()

    def add_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum the gradient of each tensor over the ranks; one that no rank has a gradient for is left without."""
        if self.count == 1:
            return
        every = list(tensors)
        present = self.total(np.array([tensor.grad is not None for tensor in every], dtype=np.float64))
        chosen = [tensor for tensor, ranks in zip(every, present.tolist(), strict=True) if ranks]
        for tensor in chosen:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        for bucket in _buckets([tensor.grad for tensor in chosen if tensor.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            with _meeting():
                dist.all_reduce(flat)
            parts = flat.split_with_sizes([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])

    def measured(self, loss: float, norm: float, tokens: TokenValues | None) -> tuple[float, TokenValues]:
        """The loss and the values of tokens of a whole step, from those of each rank; `norm` is to be the same at all.

        Raises `TrainerError` at every rank where the ranks are not at the same point any more.
        """
        if self.count == 1:
            assert tokens is not None, "at least one micro-batch"
            return loss, tokens
        found: list[tuple[float, str, TokenValues | None]] = self.gathered((loss, repr(norm), tokens))
        if len({said for _, said, _ in found}) > 1:
            raise TrainerError(
                f"the ranks have come apart: the norms of their gradients are {', '.join(said for _, said, _ in found)}"
            )
        values = [each for _, _, each in found if each is not None]
        names = {tuple(sorted(each.diagnostics)) for each in values}
        if len(names) > 1:
            raise TrainerError(
                f"the objective returned the diagnostics {' and '.join(str(list(each)) for each in sorted(names))} in "
                "one update: return the same names for every micro-batch, with zeros where there is nothing to tell"
            )
        return sum(each for each, _, _ in found), joined(values)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is cut over the ranks, over the same memory; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The gradients, in order, as many at once as `BUCKET` has room for, all of one type."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(each.numel() for each in bucket) + gradient.numel() > BUCKET
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
