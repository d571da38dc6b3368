"""LoRA versions on experts side by side: the adapters of all slots, by expert and then by slot.

On a GPU, the pairs of token and expert are sorted by expert and slot, and every pair of expert and slot is a group of
its own in the products with the adapters. On a CPU they are products over all slots of an expert, in which a mask
selects each token's own, as in `lora_slots.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engines.native.kernels import cpu_layers
from stretto.engines.native.kernels.experts import ExpertAdapters, SlotFactors, grouped_experts, looped_experts
from stretto.engines.native.lora_slots import SlotMask
from stretto.errors import ModelError
from stretto.models.expert_adapters import ADAPTER
from stretto.models.expert_products import aligned_rank
from stretto.models.lora import adapted_experts

MAX_GROUPS = 1024  # of a grouped product on CUDA


def refuse_many_groups(experts: int, slots: int) -> None:
    """Raises `ModelError` if adapters on so many experts in so many slots are too many for a product on CUDA."""
    if experts * slots >= MAX_GROUPS:
        raise ModelError(
            f"adapters on {experts} experts in {slots} version slots are {experts * slots} groups, and a grouped "
            f"product on CUDA has fewer than {MAX_GROUPS}: lower `rollout.staleness` or `runtime.slots`"
        )


class ExpertSlots:
    """The adapters of all slots on one Parameter of experts. A rank that products do not support is padded by zeros."""

    def __init__(self, weight: Tensor, slots: int, rank: int) -> None:
        experts, out, width = weight.shape
        if weight.is_cuda:
            refuse_many_groups(experts, slots)
        self.weight, self.rank = weight, rank
        padded = aligned_rank(rank, weight.dtype)
        self.factors = SlotFactors(
            weight.new_zeros(experts, slots, padded, width), weight.new_zeros(experts, slots, padded, out)
        )
        self.operands = self.factors  # they never move

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of the adapter of one slot, as it is received."""
        experts, out, width = self.weight.shape
        return torch.Size((experts, self.rank, width)), torch.Size((experts, out, self.rank))

    def resident(self, slot: int) -> tuple[Tensor, Tensor]:
        """Returns the adapter in `slot` as it was received: A [experts, r, in] and B [experts, out, r], as views."""
        a, b = self.factors
        return a[:, slot, : self.rank], b[:, slot, : self.rank].transpose(1, 2)


class SlottedExperts(nn.Module):
    """The experts of a layer with `slots` adapters on some of their Parameters, which are the base's own."""

    def __init__(self, base: Any, projections: Sequence[str], slots: int, rank: int, mask: SlotMask) -> None:
        super().__init__()
        self.num_experts, self.act_fn = base.num_experts, base.act_fn
        self.gate_up_proj, self.down_proj = base.gate_up_proj, base.down_proj
        self.mask, self.rank = mask, rank
        self.slots = {name: ExpertSlots(getattr(base, name).detach(), slots, rank) for name in projections}
        self.padding = 0  # fewest rows of a product on a CPU, found by `exact_padding`

    def adapters(self, slots: Tensor) -> ExpertAdapters:
        """Returns the adapters for tokens of these slots [tokens]."""
        up, down = (self.slots.get(name) for name in ("gate_up_proj", "down_proj"))
        return ExpertAdapters(
            None if up is None else up.factors, None if down is None else down.factors, slots, self.mask.scale
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum [tokens, width] of each token's experts, under the slots that the mask has."""
        compute = grouped_experts if hidden_states.is_cuda else looped_experts
        made = compute(
            hidden_states, top_k_index, top_k_weights.float(), self.gate_up_proj, self.down_proj, cpu_layers.gate,
            self.act_fn, self.padding, self.adapters(self.mask.slots.expand(len(hidden_states))),
        )  # fmt: skip
        return made.to(hidden_states.dtype)


def expert_layers(up: Tensor, down: Tensor, adapters: SlottedExperts | None) -> list[nn.Linear]:
    """Returns the products of one expert as linear layers, for `exact_padding`; with random numbers for adapters."""
    weights = [up[0], down[0]]
    for each in () if adapters is None else adapters.slots.values():
        a, b = (factor[0].flatten(0, 1) for factor in each.factors)
        weights += [torch.randn_like(a), torch.randn_like(b).t()]
    return [as_linear(weight) for weight in weights]


def as_linear(weight: Tensor) -> nn.Linear:
    """Returns a linear layer over this memory [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def slot_experts(
    tree: nn.Module, targets: tuple[str, ...] | None, slots: int, rank: int, mask: SlotMask
) -> dict[str, ExpertSlots]:
    """Replaces the experts that the trainer adapts, in place; returns their adapters by the trainer's names."""
    found: dict[str, ExpertSlots] = {}
    for name, projections in adapted_experts(tree, targets or ()).items():
        parent, _, last = name.rpartition(".")
        slotted = SlottedExperts(tree.get_submodule(name), projections, slots, rank, mask)
        setattr(tree.get_submodule(parent), last, slotted)
        found |= {f"{name}.{each}{ADAPTER}": own for each, own in slotted.slots.items()}
    return found
