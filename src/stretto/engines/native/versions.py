"""Where the versions of an engine live: adapter slots of one tree (LoRA), or one module tree a slot (full weights).

Both verify what is *resident* after the copy: the checksum is computed over the memory that the forward reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.checksums import all_finite, checksum
from stretto.engines.native.lora import SlotMask, slot_linears
from stretto.errors import ChecksumError, ModelError
from stretto.models import second_tree
from stretto.types import Weights


class Slots(Protocol):
    """The weights of up to `count` versions."""

    trees: Sequence[nn.Module]
    mixed: bool  # one forward serves the rows of all slots

    def put(self, slot: int, weights: Weights) -> None:
        """Copy weights into a slot and confirm their checksum, or raise and leave the slot empty."""
        ...

    def clear(self, slot: int) -> None:
        """Forget what is in a slot."""
        ...

    def choose(self, slots: Tensor) -> None:
        """Say which slot each token [tokens] of the next forward uses."""
        ...


def _confirm(resident: Mapping[str, Tensor], weights: Weights) -> None:
    found = checksum(resident, weights.scale)
    if found != weights.checksum:
        raise ChecksumError(
            f"version {weights.version} arrived with checksum `{found}`, the trainer sent `{weights.checksum}`"
        )


class LoraSlots:
    """Adapters of all versions in one tree over the base's Parameters."""

    mixed = True

    def __init__(self, model: nn.Module, count: int, rank: int, targets: tuple[str, ...] | None) -> None:
        tree = second_tree(model, share=True)
        self._mask = SlotMask(count, rank, next(model.parameters()).device)
        self._linears = slot_linears(tree, targets, count, rank, self._mask)
        self._rank = rank
        self._scales: dict[int, float] = {}
        self.trees: Sequence[nn.Module] = (tree,)

    def _check(self, weights: Weights, slot: int) -> None:
        if weights.kind != "lora":
            raise ModelError(f"version {weights.version} has {weights.kind} weights, the engine holds lora")
        others = {s for k, s in self._scales.items() if k != slot}
        if others - {weights.scale}:
            # One scale for all is applied in the product, so that a row does not depend on who is beside it.
            raise ModelError(f"version {weights.version} has `scale` {weights.scale}, resident ones {sorted(others)}")
        for name, tensor in weights.tensors.items():
            module, _, part = name.rpartition(".")
            if module not in self._linears or part not in ("lora_A", "lora_B"):
                raise ModelError(f"version {weights.version} has `{name}`, which is no target of `lora_targets`")
            linear = self._linears[module]
            rank = self._rank
            shape = (rank, linear.in_features) if part == "lora_A" else (linear.out_features, rank)
            if tuple(tensor.shape) != shape or tensor.dtype != linear.weight.dtype:
                raise ModelError(
                    f"`{name}` of version {weights.version} is {tuple(tensor.shape)} {tensor.dtype},"
                    f" the slot holds {shape} {linear.weight.dtype}"
                )
            if f"{module}.{'lora_B' if part == 'lora_A' else 'lora_A'}" not in weights.tensors:
                raise ModelError(f"`{name}` of version {weights.version} comes without its other half")
        if not all_finite(list(weights.tensors.values())):
            # The mask keeps foreign products out, but zero times a NaN of B would still reach every row.
            bad = [name for name, tensor in weights.tensors.items() if not all_finite([tensor])]
            raise ModelError(f"`{bad[0]}` of version {weights.version} has values that are not finite")

    def put(self, slot: int, weights: Weights) -> None:
        self._check(weights, slot)
        self.clear(slot)
        resident = self._resident(slot, {name.rpartition(".")[0] for name in weights.tensors})
        for part in ("lora_A", "lora_B"):  # apart: the halves of one kind lie alike, and go in few launches
            own = [name for name in resident if name.endswith(part)]
            torch._foreach_copy_([resident[name] for name in own], [weights.tensors[name] for name in own])
        try:
            _confirm(resident, weights)
        except ChecksumError:
            self.clear(slot)
            raise
        self._scales[slot] = self._mask.scale = weights.scale

    def _resident(self, slot: int, names: Iterable[str]) -> dict[str, Tensor]:
        """What is in a slot as it was received, views of what the forward reads."""
        resident: dict[str, Tensor] = {}
        for name in names:
            resident[f"{name}.lora_A"], resident[f"{name}.lora_B"] = self._linears[name].resident(slot)
        return resident

    def clear(self, slot: int) -> None:
        """Zero a slot, so that nothing of an unloaded version stays behind."""
        self._scales.pop(slot, None)
        torch._foreach_zero_(list(self._resident(slot, self._linears).values()))

    def choose(self, slots: Tensor) -> None:
        self._mask.choose(slots)


class FullSlots:
    """A module tree with Parameters of its own for every slot; buffers are made once and never exchanged."""

    mixed = False

    def __init__(self, model: nn.Module, count: int) -> None:
        self.trees: Sequence[nn.Module] = tuple(second_tree(model, share=False) for _ in range(count))
        for tree in self.trees:
            tree.requires_grad_(False)
        self._parameters = [dict(tree.named_parameters()) for tree in self.trees]

    def put(self, slot: int, weights: Weights) -> None:
        if weights.kind != "full":
            raise ModelError(f"version {weights.version} has {weights.kind} weights, the engine holds full")
        parameters = self._parameters[slot]
        if odd := sorted(parameters.keys() ^ weights.tensors.keys()):
            raise ModelError(f"version {weights.version} and the model differ in the parameters {odd[:4]}")
        for name, tensor in weights.tensors.items():
            if tensor.shape != parameters[name].shape or tensor.dtype != parameters[name].dtype:
                raise ModelError(f"`{name}` of version {weights.version} is {tuple(tensor.shape)} {tensor.dtype}")
        torch._foreach_copy_([parameters[name] for name in weights.tensors], list(weights.tensors.values()))
        _confirm({name: parameters[name] for name in weights.tensors}, weights)

    def clear(self, slot: int) -> None:
        """Nothing to forget: a slot without a version is never run, and loading overwrites all of it."""

    def choose(self, slots: Tensor) -> None:
        """Rows of different slots never meet in a forward."""


def make_slots(
    model: nn.Module, kind: str, count: int, rank: int | None, targets: tuple[str, ...] | None
) -> LoraSlots | FullSlots:
    """The slots of an engine; created outside inference mode, so that shared Parameters stay what they are."""
    assert not torch.is_inference_mode_enabled()
    if kind == "full":
        return FullSlots(model, count)
    if kind != "lora":
        raise ModelError(f"`kind = {kind!r}` is neither `lora` nor `full`")
    if rank is None:
        raise ModelError('`kind = "lora"` needs `lora_rank`')
    return LoraSlots(model, count, rank, targets)
