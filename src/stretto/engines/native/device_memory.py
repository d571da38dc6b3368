"""Copies from the host to a device that do not wait for the work queued there."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic] | Tensor, device: torch.device) -> Tensor:
    """Returns the array as a tensor on `device`. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(target: Tensor, tensor: Tensor) -> None:
    """Copies a tensor of the host into `target`."""
    target.copy_(tensor if target.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)
