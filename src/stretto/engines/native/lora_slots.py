"""LoRA versions side by side: every linear layer holds the adapters of all slots, and a mask selects each token's own.

`y = x W^T + b + scale * select(x A_all) B_all`. The mask *selects*: multiplying by zero would let a NaN of one version
reach the rows of another. All versions run in one forward, so a second version costs a wider A and B, not a second
pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.lora import adapted_modules

FUSED = 3  # layers that are computed as one product, at most


class SlotMask:
    """The columns of `x A_all` that each token must not see, and the scale: shared by all layers of one tree."""

    def __init__(self, slots: int, rank: int, device: torch.device) -> None:
        self._width = slots * rank
        self._slot_of_column = torch.arange(slots, device=device).repeat_interleave(rank).repeat(FUSED)
        self.scale = 1.0
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)  # of each token, or of all
        # By the number of layers side by side in one product: [tokens or 1, layers * slots * rank].
        self.foreign_of: tuple[Tensor, ...] = ()
        self._set(torch.zeros(1, FUSED * self._width, dtype=torch.bool, device=device))

    @property
    def foreign(self) -> Tensor:
        return self.foreign_of[1]

    def choose(self, slots: Tensor) -> None:
        """Sets the slot [tokens] of every token of the next forward."""
        self.slots = slots
        self._set(slots.unsqueeze(1) != self._slot_of_column)

    def _set(self, foreign: Tensor) -> None:
        width = self._width
        self.foreign_of = (foreign[:, :0], foreign[:, :width], foreign[:, : 2 * width], foreign)


class SlottedLinear(nn.Module):
    """A linear layer with `slots` adapters. Weight and bias are the base's own Parameters."""

    def __init__(self, base: nn.Linear, slots: int, rank: int, mask: SlotMask) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        a = torch.zeros(self.in_features, slots * rank, dtype=base.weight.dtype, device=base.weight.device)
        b = torch.zeros(slots * rank, self.out_features, dtype=base.weight.dtype, device=base.weight.device)
        self.lora_a: Tensor
        self.lora_b: Tensor
        self.register_buffer("lora_a", a, persistent=False)
        self.register_buffer("lora_b", b, persistent=False)
        self.rank = rank
        self.mask = mask
        self._keep_operands()

    def _keep_operands(self) -> None:
        # The same tensors in a plain attribute: a look-up of a Parameter or buffer costs as much as a small product.
        self.operands = (self.weight, self.bias, self.lora_a, self.lora_b, self.in_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, a, b, width, out = self.operands
        flat, mask = x.reshape(-1, width), self.mask
        y = F.linear(flat, weight, bias)
        h = torch.mm(flat, a).masked_fill_(mask.foreign, 0.0)
        return y.addmm_(h, b, alpha=mask.scale).view(*x.shape[:-1], out)

    def place(self, a: Tensor, b: Tensor) -> None:
        """Moves the adapters of all slots into `a` and `b`, views of the memory that a fused product reads."""
        self.lora_a, self.lora_b = a.copy_(self.lora_a), b.copy_(self.lora_b)
        self._keep_operands()

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of the adapter of one slot, as it is received."""
        return torch.Size((self.rank, self.in_features)), torch.Size((self.out_features, self.rank))

    def resident(self, slot: int) -> tuple[Tensor, Tensor]:
        """Returns the adapter in `slot` as it was received: A [r, in] and B [out, r], views of the forward's memory."""
        own = slice(slot * self.rank, (slot + 1) * self.rank)
        return self.lora_a[:, own].t(), self.lora_b[own].t()


def slot_linears(
    tree: nn.Module, targets: tuple[str, ...] | None, slots: int, rank: int, mask: SlotMask
) -> dict[str, SlottedLinear]:
    """Replaces the linear layers that the trainer adapts, in place; returns them by name.

    If `targets` is None, that is every linear layer but the head.
    """
    found: dict[str, SlottedLinear] = {}
    for name, module in adapted_modules(tree, targets or ()).items():
        parent, _, last = name.rpartition(".")
        found[name] = SlottedLinear(module, slots, rank, mask)
        setattr(tree.get_submodule(parent), last, found[name])
    return found
