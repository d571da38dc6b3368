"""The slots that hold the versions of an engine: adapters in one tree (LoRA), or one module tree a slot (full weights).

Both verify the weights after the copy: the checksum is computed over the memory that the forward reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.engines.native.expert_slots import ExpertSlots, slot_experts
from stretto.engines.native.kernels.resident_weights import DeviceResident, PlainResident, Resident, fits
from stretto.engines.native.lora_slots import SlotMask, SlottedLinear, slot_linears
from stretto.errors import ChecksumError, ModelError
from stretto.models.checksums import all_finite, checksum
from stretto.models.loading import second_tree
from stretto.types import Weights


class Slots(Protocol):
    """The weights of up to `count` versions."""

    trees: Sequence[nn.Module]
    one_tree: bool  # one forward serves the rows of all slots

    def put(self, slot: int, weights: Weights) -> None:
        """Copies weights into a slot and confirms their checksum, or raises and leaves the slot empty."""
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        ...

    def choose(self, slots: Tensor) -> None:
        """Sets the slot of each token [tokens] of the next forward."""
        ...


def _other_checksum(weights: Weights, found: str) -> ChecksumError:
    return ChecksumError(
        f"version {weights.version} arrived with checksum `{found}`, the trainer sent `{weights.checksum}`"
    )


class LoraSlots:
    """Adapters of all versions in one tree over the base's Parameters.

    On a GPU a version is copied and confirmed on a stream of its own; steps that are under way do not use the slot, and
    continue. A slot without a version holds zeros.
    """

    one_tree = True

    def __init__(self, model: nn.Module, count: int, rank: int, targets: tuple[str, ...] | None) -> None:
        tree = second_tree(model, share=True)
        device = next(model.parameters()).device
        self._mask = SlotMask(count, rank, device)
        self._adapted: dict[str, SlottedLinear | ExpertSlots] = {
            **slot_linears(tree, targets, count, rank, self._mask),
            **slot_experts(tree, targets, count, rank, self._mask),
        }
        self._rank = rank
        self._scales: dict[int, float] = {}
        self._used: set[int] = set()  # slots that may hold something other than zeros
        self._stream: torch.cuda.Stream | None = None
        self._cleared: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._expected: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name, layer in self._adapted.items():
            for leaf, shape in zip(("lora_A", "lora_B"), layer.shapes, strict=True):
                self._expected[f"{name}.{leaf}"] = shape, layer.weight.dtype
        self._placed: list[tuple[SlottedLinear | ExpertSlots, object]] = []
        self._views: dict[int, dict[str, Tensor]] = {}
        self._residents: dict[int, Resident] = {}
        self.trees: Sequence[nn.Module] = (tree,)

    def _check(self, weights: Weights, slot: int) -> None:
        if weights.kind != "lora":
            raise ModelError(f"version {weights.version} has {weights.kind} weights, the engine holds lora")
        others = {s for k, s in self._scales.items() if k != slot}
        if others - {weights.scale}:
            # One scale for all is applied in the product, so that a row does not depend on its neighbours.
            raise ModelError(f"version {weights.version} has `scale` {weights.scale}, resident ones {sorted(others)}")
        for name, tensor in weights.tensors.items():
            expected = self._expected.get(name)
            if expected is None:
                raise ModelError(f"version {weights.version} has `{name}`, which is no target of `lora_targets`")
            if (tensor.shape, tensor.dtype) != expected:
                raise ModelError(
                    f"`{name}` of version {weights.version} is {tuple(tensor.shape)} {tensor.dtype},"
                    f" the slot holds {tuple(expected[0])} {expected[1]}"
                )
            if (name[:-1] + ("B" if name[-1] == "A" else "A")) not in weights.tensors:
                raise ModelError(f"`{name}` of version {weights.version} comes without its other half")

    def put(self, slot: int, weights: Weights) -> None:
        self._check(weights, slot)
        if slot in self._used:
            self._refuse_infinite(weights)  # before the old weights are lost
            self.clear(slot)
        self._used.add(slot)
        if self._stream is not None and self._cleared is not None:
            self._stream.wait_event(self._cleared)
        found = self._resident(slot, tuple(weights.tensors)).receive(weights.tensors, weights.scale)
        if not found.finite or found.checksum != weights.checksum:
            self.clear(slot)
            self._refuse_infinite(weights)
            raise _other_checksum(weights, found.checksum)
        self._scales[slot] = self._mask.scale = weights.scale

    def _refuse_infinite(self, weights: Weights) -> None:
        # The mask keeps the products of other versions out, but zero times a NaN of B would still reach every row.
        if not all_finite(list(weights.tensors.values())):
            bad = [name for name, tensor in weights.tensors.items() if not all_finite([tensor])]
            raise ModelError(f"`{bad[0]}` of version {weights.version} has values that are not finite")

    def _resident(self, slot: int, names: tuple[str, ...]) -> Resident:
        """Returns the memory of the tensors of these names in a slot; cached, because it is expensive to make."""
        views = self._views_of(slot)
        resident = self._residents.get(slot)
        if resident is None or resident.names != names:
            own = {name: views[name] for name in names}
            if self._stream is not None and fits(own.values()):
                resident = DeviceResident(own, self._stream)
            else:
                resident = PlainResident(own)
            self._residents[slot] = resident
        return resident

    def _views_of(self, slot: int) -> dict[str, Tensor]:
        """Returns the adapters in a slot as they were received, as views of the memory that the forward reads."""
        if any(layer.operands is not operands for layer, operands in self._placed):
            self._views, self._residents, self._placed = {}, {}, []  # a decoder has moved the adapters
        if slot not in self._views:
            self._placed = [(layer, layer.operands) for layer in self._adapted.values()]
            self._views[slot] = {}
            for name, layer in self._adapted.items():
                self._views[slot][f"{name}.lora_A"], self._views[slot][f"{name}.lora_B"] = layer.resident(slot)
        return self._views[slot]

    def clear(self, slot: int) -> None:
        """Sets a slot to zeros, so that nothing of an unloaded version remains."""
        self._scales.pop(slot, None)
        torch._foreach_zero_(list(self._views_of(slot).values()))
        self._used.discard(slot)
        if self._stream is not None:
            self._cleared = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._cleared.record()

    def choose(self, slots: Tensor) -> None:
        self._mask.choose(slots)


class FullSlots:
    """A module tree with Parameters of its own for every slot; buffers are made once and never exchanged."""

    one_tree = False

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
            own = parameters[name]
            if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
                raise ModelError(
                    f"`{name}` of version {weights.version} is {tuple(tensor.shape)} {tensor.dtype},"
                    f" the slot holds {tuple(own.shape)} {own.dtype}"
                )
        torch._foreach_copy_([parameters[name] for name in weights.tensors], list(weights.tensors.values()))
        found = checksum({name: parameters[name] for name in weights.tensors}, weights.scale)
        if found != weights.checksum:
            raise _other_checksum(weights, found)

    def clear(self, slot: int) -> None:
        """Does nothing: a slot without a version is never run, and loading overwrites all of it."""

    def choose(self, slots: Tensor) -> None:
        """Does nothing: rows of different slots never run in one forward."""


def make_slots(
    model: nn.Module, kind: str, count: int, rank: int | None, targets: tuple[str, ...] | None
) -> LoraSlots | FullSlots:
    """Returns the slots of an engine. Not for use in inference mode: shared Parameters must stay ordinary tensors."""
    assert not torch.is_inference_mode_enabled()
    if kind == "full":
        return FullSlots(model, count)
    if kind != "lora":
        raise ModelError(f"`kind = {kind!r}` is neither `lora` nor `full`")
    if rank is None:
        raise ModelError('`kind = "lora"` needs `lora_rank`')
    return LoraSlots(model, count, rank, targets)
