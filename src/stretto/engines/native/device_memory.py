"""Copies from the host to a device that do not wait for the work queued there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes


def to_device(array: NDArray[np.generic] | Tensor, device: torch.device) -> Tensor:
    """Returns the array as a tensor on `device`. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors on `device`, brought there by one copy. On a CPU they share the arrays' memory.

    Each copy costs the host a buffer and some calls, during which other threads may take the interpreter.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    bytes_of, begin = staged.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        bytes_of[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += size
    parts = staged.to(device, non_blocking=True).split_with_sizes(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def copy_to_device(target: Tensor, tensor: Tensor) -> None:
    """Copies a tensor of the host into `target`."""
    target.copy_(tensor if target.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)
