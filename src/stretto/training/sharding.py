"""Full weights sharded over the ranks: FSDP2 on the decoder's layers.

Each rank holds its shard of every layer's parameters, gradients and optimizer state. A layer is whole on a rank only
while it runs. Embeddings, the last norm and the head are whole on every rank, because their weights are used outside of
any layer: they train as in plain data parallelism. The optimizer steps the shards directly, because AdamW treats each
element on its own.

A pass through the model is a collective operation, so every rank makes the same number of passes: a rank with fewer
micro-batches makes empty ones. A rank that fails within a pass leaves the others waiting, so the ranks cannot agree on
the failure: the group ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.errors import ModelError, RecipeError
from stretto.training.forward import PackedModel
from stretto.training.parallel import Ranks, local

SHARDED_FROM = 100_000_000  # parameters; a smaller model is whole on every rank, which takes less than 2 GB


def wants_sharding(model: torch.nn.Module, ranks: Ranks, asked: bool | None, *, lora: bool) -> bool:
    """Decides whether weights are sharded: full weights of several ranks, and by default only if they are many."""
    if ranks.count == 1 or lora:
        if asked:
            raise RecipeError("only full weights can be sharded, and only over several ranks")
        return False
    return sum(p.numel() for p in model.parameters()) >= SHARDED_FROM if asked is None else asked


class Sharding:
    """Shards the layers of a model in place, and converts between shards and whole tensors."""

    def __init__(self, packed: PackedModel, ranks: Ranks) -> None:
        self.ranks = ranks
        layers = getattr(packed.decoder, "layers", None)
        if layers is None:
            raise ModelError(
                f"`{type(packed.model).__name__}` has no `layers` to shard over the ranks: train it with `model.lora`, "
                "or with `runtime.trainers = 1`"
            )
        device, dtype = packed.head.weight.device, packed.head.weight.dtype
        mesh: DeviceMesh = init_device_mesh(device.type, (ranks.count,))
        half = dtype not in (torch.float32, torch.float64)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            layer.set_gradient_divide_factor(1.0)  # a sum: loss weights are those of the whole mini-batch
            layer.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        whole = {p for p in packed.decoder.parameters() if not isinstance(p, DTensor)}
        fully_shard(packed.decoder, mesh=mesh, mp_policy=policy, ignored_params=whole)
        self._sharded: dict[str, Any] = {
            name: p for name, p in packed.model.named_parameters() if isinstance(p, DTensor)
        }

    def whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Returns a whole parameter, or a tensor of its shape, from this rank's shard. Collective."""
        like = self._sharded[name]
        made = DTensor.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        full: torch.Tensor = made.full_tensor()
        return full

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a whole tensor, by FSDP's rule."""
        chunks = whole.chunk(self.ranks.count)
        return chunks[self.ranks.rank] if self.ranks.rank < len(chunks) else whole[:0]

    def parameters(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Copies every parameter, whole, to the host memory of rank 0; empty on other ranks. Collective."""
        found = {}
        for name, parameter in model.named_parameters():
            own = parameter.detach()
            full = self.whole(name, local(own)) if name in self._sharded else own
            if self.ranks.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found

    def gathered(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies a state, whole, to the host memory of rank 0; empty on other ranks. Collective."""
        found = {}
        for key, tensor in state.items():
            name = self._name(key)
            full = tensor if name is None else self.whole(name, tensor)
            if self.ranks.rank == 0:
                found[key] = full.to("cpu", copy=True)
        return found

    def scattered(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's shards of a whole state."""
        return {key: tensor if self._name(key) is None else self.shard(tensor) for key, tensor in state.items()}

    def _name(self, key: str) -> str | None:
        """The sharded parameter that an entry of a state has the shape of; None if there is none."""
        kind, _, name = key.partition("/")
        return name if kind in ("value", "mean", "square") and name in self._sharded else None
