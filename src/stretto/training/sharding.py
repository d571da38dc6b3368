"""Full weights that are cut over the ranks: FSDP2 on the decoder's layers.

Each rank holds its part of every layer's parameters, gradients and optimizer state; a layer is whole at a rank only
while it runs. Embeddings, the last norm and the head are whole everywhere, because their weights are used outside of
any layer: they train as in plain data parallelism. The optimizer steps the parts as they are, since AdamW looks at each
number alone.

A pass through the model is a meeting of all ranks, so every rank makes as many as any other: one with fewer
micro-batches makes passes that count for nothing. And a rank that fails within a pass leaves the others waiting, so
there is no agreeing on it: the group is over.
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

SHARDED_FROM = 100_000_000  # parameters; fewer are whole at every rank, where that needs less than two gigabytes


def wants_sharding(model: torch.nn.Module, ranks: Ranks, asked: bool | None, *, lora: bool) -> bool:
    """Whether full weights are cut over the ranks: where there are several, and by default where they are many."""
    if ranks.count == 1 or lora:
        if asked:
            raise RecipeError("full weights of several ranks can be cut over them, and nothing else can")
        return False
    return sum(p.numel() for p in model.parameters()) >= SHARDED_FROM if asked is None else asked


class Sharding:
    """Cuts the layers of a model, and brings parts and wholes to one another. The tree stays the model's own."""

    def __init__(self, packed: PackedModel, ranks: Ranks) -> None:
        self.ranks = ranks
        layers = getattr(packed.decoder, "layers", None)
        if layers is None:
            raise ModelError(
                f"`{type(packed.model).__name__}` has no `layers` to cut over the ranks: train it with `lora`, or with "
                "`runtime.trainers = 1`"
            )
        device, dtype = packed.head.weight.device, packed.head.weight.dtype
        mesh: DeviceMesh = init_device_mesh(device.type, (ranks.count,))
        half = dtype not in (torch.float32, torch.float64)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            layer.set_gradient_divide_factor(1.0)  # a sum: weights of tokens are those of the whole batch
            layer.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        whole = {p for p in packed.decoder.parameters() if not isinstance(p, DTensor)}
        fully_shard(packed.decoder, mesh=mesh, mp_policy=policy, ignored_params=whole)
        self._cut: dict[str, Any] = {name: p for name, p in packed.model.named_parameters() if isinstance(p, DTensor)}

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of what has its shape, from this rank's part. A meeting."""
        like = self._cut[name]
        made = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        full: torch.Tensor = made.full_tensor()
        return full

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole, by the rule that layers are cut by."""
        chunks = whole.chunk(self.ranks.count)
        return chunks[self.ranks.rank] if self.ranks.rank < len(chunks) else whole[:0]

    def parameters(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """A whole copy of every parameter, in the memory of the host, at rank 0; empty at the others. A meeting."""
        found = {}
        for name, parameter in model.named_parameters():
            own = parameter.detach()
            full = self.whole(name, local(own)) if name in self._cut else own
            if self.ranks.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found

    def gathered(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state as one process has it, in the memory of the host, at rank 0; empty at the others. A meeting."""
        found = {}
        for key, tensor in state.items():
            name = self._name(key)
            full = tensor if name is None else self.whole(name, tensor)
            if self.ranks.rank == 0:
                found[key] = full.to("cpu", copy=True)
        return found

    def scattered(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts of a state as one process has it."""
        return {
            key: tensor if (name := self._name(key)) is None else self.part(name, tensor)
            for key, tensor in state.items()
        }

    def _name(self, key: str) -> str | None:
        """The parameter that an entry of a state has the shape of, where that is cut."""
        kind, _, name = key.partition("/")
        return name if kind in ("value", "mean", "square") and name in self._cut else None
