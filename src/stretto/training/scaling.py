"""The scale of the loss, which keeps gradients inside the range of float16.

Between 6e-5 and 6e-8 float16 loses bit by bit, and below that everything; the gradient of an activation is often there.
So the loss is multiplied by a power of two before the backward pass, and gradients are divided by it once they are
float32: both are exact. A gradient that leaves the range at the other end, 65,504, is not finite. Its step is then made
again with half of the scale, before anything has been stepped; after `PATIENCE` updates the scale is doubled, up to
where it began. bfloat16 has the range of float32 and needs none of this.

Every rank decides by the norm of the whole gradient, which is the same at all of them. What the next update does
depends on the scale, so it is a part of a trainer's state.
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
    """What the loss is multiplied by, and how many updates in a row that has been right for."""

    value: float = START
    updates: int = 0

    def lowered(self) -> LossScale | None:
        """The scale to try after a gradient that was not finite; None where there is none left."""
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
        """What `state` gave. Raises `TrainerError` where it is something else."""
        if state.numel() != 2:
            raise TrainerError(f"the checkpoint's `loss_scale` has {state.numel()} numbers and does not fit")
        value, updates = state.tolist()
        return cls(value, int(updates))


def scale_for(dtype: torch.dtype) -> LossScale | None:
    """Where the scale of a trainer begins whose model has this type; None where it needs none."""
    return LossScale() if dtype == torch.float16 else None


def divide_gradients(tensors: Iterable[torch.Tensor], scale: float) -> None:
    """Divide the float32 gradient of each tensor, in place."""
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)  # a power of two: exact
