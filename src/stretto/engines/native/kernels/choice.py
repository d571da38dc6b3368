"""The kernels of a device step as one object: Triton's on a GPU, or their plain twins, which are the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stretto.engines.native.kernels import attention, extend, layers, plan
from stretto.engines.native.kernels.draw import draw, plain_draw


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a fused decoder calls between two products; signatures are those of the functions named alike."""

    add_norm: Callable[..., Any]
    split_heads: Callable[..., Any]
    gate: Callable[..., Any]
    draw: Callable[..., Any]
    plan_items: Callable[..., Any]
    paged_decode: Callable[..., Any]
    paged_extend: Callable[..., Any]


TRITON = Kernels(
    layers.add_norm,
    layers.split_heads,
    layers.gate,
    draw,
    plan.plan_items,
    attention.paged_decode,
    extend.paged_extend,
)
PLAIN = Kernels(
    layers.plain_add_norm,
    layers.plain_split_heads,
    layers.plain_gate,
    plain_draw,
    plan.plan_items_reference,
    attention.paged_decode_reference,
    extend.paged_extend_reference,
)


def kernels_for(device: torch.device) -> Kernels:
    """Triton's kernels on a GPU, their twins elsewhere."""
    return TRITON if device.type == "cuda" else PLAIN
