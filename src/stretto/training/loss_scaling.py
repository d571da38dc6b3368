"""Loss scaling, which keeps gradients within the range of float16.

float16 loses bits between 6e-5 and 6e-8 and everything below that, which is where the gradients of activations often
lie. So the loss is multiplied by a power of two before the backward pass, and gradients are divided by it once they are
float32: both are exact. A gradient that exceeds the range at the other end, 65,504, is not finite. Its step is then
computed again with half the scale, before anything has been stepped. After `PATIENCE` updates the scale is doubled, up
to its initial value. bfloat16 has the range of float32 and needs no scaling.

Every rank decides by the norm of the whole gradient, which is the same on all ranks. The scale changes what the next
update computes, so it is part of a trainer's state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from stretto.errors import TrainerError

START = 2.0**16
FLOOR = 1.0
PATIENCE = 100  # updates


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor of the loss, and the number of updates in a row that it has worked for."""

    value: float = START
    updates: int = 0

    def lowered(self) -> LossScale | None:
        """The scale to try after a gradient that was not finite; None if it cannot be lowered further."""
        return LossScale(self.value / 2) if self.value > FLOOR else None

    def after_update(self) -> LossScale:
        """The scale of the next update."""
        if self.value >= START:
            return LossScale(self.value)
        if self.updates + 1 < PATIENCE:
            return LossScale(self.value, self.updates + 1)
        return LossScale(2 * self.value)

    def state(self) -> torch.Tensor:
        return torch.tensor([self.value, self.updates], dtype=torch.float64)

    @classmethod
    def of_state(cls, state: torch.Tensor) -> LossScale:
        """Restores a scale from `state()`. Raises `TrainerError` if the tensor is something else."""
        if state.numel() != 2:
            raise TrainerError(f"the checkpoint's `loss_scale` has {state.numel()} numbers; expected 2")
        value, updates = state.tolist()
        return cls(value, int(updates))


def initial_loss_scale(dtype: torch.dtype) -> LossScale | None:
    """The initial scale for a model of this type; None if it needs none."""
    return LossScale() if dtype == torch.float16 else None


def divide_gradients(tensors: Iterable[torch.Tensor], scale: float) -> None:
    """Divides the float32 gradient of each tensor, in place."""
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)  # a power of two: exact
