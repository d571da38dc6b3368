"""Data parallelism: ranks are processes that train one policy together, each on its share of every batch.

Every rank gets the whole batch and computes what depends on the whole batch: mini-batches, loss weights, rewards,
advantages. It runs only its own sequences through the model. The ranks then exchange results (table below). A gradient
is a sum over sequences with the weights of the whole mini-batch, so the sum over ranks equals the gradient of a single
rank up to rounding. Every rank takes the same optimizer step and holds the same state afterwards.

| when                          | exchanged                                                    |
|-------------------------------|--------------------------------------------------------------|
| after each pass over a batch  | failures: if one rank fails, all fail, and none waits for it |
| before advantages             | a critic's values, divergences in the reward                 |
| before each optimizer step    | gradients; losses and token values, for the metrics          |

A rank whose share is empty takes part in every exchange.
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

from stretto.errors import TrainerError, TrainerLostError
from stretto.models.checksums import checksum
from stretto.training.update_metrics import TokenValues, concatenate

BUCKET = 1 << 26  # elements in one all-reduce: a quarter of a gigabyte in float32


def shares(sizes: Sequence[int] | NDArray[np.int64], count: int) -> list[list[int]]:
    """Divides sequences over ranks: longest first, each to the rank with the fewest tokens so far.

    Every index appears once, and each rank keeps the order of the batch. The result depends on the arguments alone. No
    rank has more tokens than the mean plus the longest sequence. With fewer sequences than ranks, some have none.
    """
    loads = [(0, rank) for rank in range(count)]
    found: list[list[int]] = [[] for _ in range(count)]
    for index in np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        found[rank].append(index)
        heapq.heappush(loads, (load + int(sizes[index]), rank))
    return [sorted(each) for each in found]


def open_rendezvous(host: str, port: int, *, count: int, timeout_s: float, first: bool) -> Any:
    """Opens the store through which ranks find each other. The `first` rank creates it; port 0 chooses a free port."""
    timeout = _timeout(timeout_s)
    with _collective():
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, count, is_master=first, timeout=timeout, wait_for_workers=False
        )


def _timeout(timeout_s: float) -> timedelta:
    return timedelta(seconds=min(timeout_s, 1e7))


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Turns a failed collective operation into `TrainerLostError`: a rank is gone, and this group cannot continue."""
    try:
        yield
    except RuntimeError as error:
        raise TrainerLostError(
            f"the ranks of the trainer cannot reach each other: {type(error).__name__}: {error}"
        ) from error


class Ranks:
    """The ranks of one policy, as seen from one of them. Created once a process.

    Every method is a collective operation: all ranks call it, in the same order, with matching arguments. With a single
    rank it does nothing.
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
        store: Any = None,  # that `open_rendezvous` returned to rank 0
    ) -> Ranks:
        """Joins the other ranks at the store of rank 0. A collective operation longer than `timeout_s` fails.

        Tensors on a GPU travel by NCCL, everything else by gloo.
        """
        if count > 1:
            store = (
                open_rendezvous(host, port, count=count, timeout_s=timeout_s, first=False) if store is None else store
            )
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with _collective():
                dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_timeout(timeout_s))
        return cls(rank, count)

    def leave(self) -> None:
        """Leaves the group of ranks."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def gathered(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with _collective():
            dist.all_gather_object(found, value)
        return found

    @contextlib.contextmanager
    def together(self, *, collective_passes: bool = False) -> Iterator[None]:
        """Runs the body on every rank. If it fails on one, it fails on all, once all have reached its end.

        With `collective_passes`, passes through the model are collective too, so the other ranks cannot reach the end:
        the rank fails alone.
        """
        if self.count == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except TrainerLostError:
            raise  # the other ranks cannot be reached
        except Exception as raised:
            if collective_passes:
                if isinstance(raised, RuntimeError) and not isinstance(raised, torch.OutOfMemoryError):
                    raise TrainerLostError(f"a pass of all ranks failed: {raised}") from raised
                raise
            error = raised
        failures = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            try:
                raise error
            finally:
                error = None  # it refers to this frame, and so to everything that the body allocated
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise TrainerError(f"rank {rank} of {self.count} failed: {failure}")

    def check_same(self, tensors: Mapping[str, torch.Tensor], option: str = "model.path") -> None:
        """Raises `TrainerError` on every rank unless all have the same values of the model that `option` names."""
        if self.count > 1 and len(set(found := self.gathered(checksum(tensors)))) > 1:
            raise TrainerError(
                f"the ranks have loaded different models, with checksums {', '.join(found)}: give every machine the "
                f"same files of `{option}`"
            )

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the sum over ranks, in float64."""
        if self.count == 1:
            return values
        summed = torch.from_numpy(values.astype(np.float64, copy=True))
        with _collective():
            dist.all_reduce(summed)
        return summed.numpy()

    def add_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sums the gradient of each tensor over the ranks. A tensor without a gradient on any rank stays without."""
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
            with _collective():
                dist.all_reduce(flat)
            parts = flat.split_with_sizes([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])

    def combine(self, loss: float, norm: float, tokens: TokenValues | None) -> tuple[float, TokenValues]:
        """Returns the loss and the token values of a whole step, from those of each rank.

        Raises `TrainerError` on every rank if `norm` is not the same on all: the ranks have diverged.
        """
        if self.count == 1:
            assert tokens is not None, "at least one micro-batch"
            return loss, tokens
        found: list[tuple[float, str, TokenValues | None]] = self.gathered((loss, repr(norm), tokens))
        if len({each for _, each, _ in found}) > 1:
            raise TrainerError(
                f"the ranks have diverged: the norms of their gradients are {', '.join(each for _, each, _ in found)}"
            )
        values = [each for _, _, each in found if each is not None]
        names = {tuple(sorted(each.diagnostics)) for each in values}
        if len(names) > 1:
            raise TrainerError(
                f"the objective returned the diagnostics {' and '.join(str(list(each)) for each in sorted(names))} in "
                "one update: return the same names for every micro-batch, with zeros if there is nothing to report"
            )
        return sum(each for each, _, _ in found), concatenate(values)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a sharded tensor, without a copy; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups the gradients, in order, into buckets of at most `BUCKET` elements of one type."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(each.numel() for each in bucket) + gradient.numel() > BUCKET
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
