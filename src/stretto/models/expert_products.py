"""The products of experts: every token through the few experts that its router chose, grouped by expert.

The pairs of token and expert are sorted by expert. Then a linear layer of all experts is one grouped product, and so is
each factor of their adapters. Sizes depend on the number of tokens alone, and the host reads nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.float32_products import wide_type

ALIGNMENT = 16  # bytes: strides that grouped products support are a multiple of this


class Factors(NamedTuple):
    """The adapters of one linear layer of all experts: group `g` adds `scale * (x a[g]) b[g]`."""

    a: Tensor  # [groups, in, rank]
    b: Tensor  # [groups, rank, out]
    scale: float


def aligned_rank(rank: int, dtype: torch.dtype) -> int:
    """Returns the smallest rank from `rank` on that grouped products of this type support."""
    step = ALIGNMENT // dtype.itemsize
    return -(-rank // step) * step


def sort_into_groups(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the order [pairs] that sorts pairs by their group, and where each of the `count` groups ends, int32."""
    in_order, order = groups.sort(stable=True)
    return order, ends_of(in_order, count)


def ends_of(in_order: Tensor, count: int) -> Tensor:
    """Returns where each of the `count` groups of sorted pairs ends [count], int32."""
    return torch.searchsorted(in_order, torch.arange(count, device=in_order.device), right=True, out_int32=True)


def grouped_product(x: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """Returns `x[rows of group g] @ factor[g]` for all groups [rows, out]; `factor` is [groups, in, out].

    There is no grouped product in float64, so that one runs group by group: it serves tests.
    """
    if x.dtype != torch.float64:
        return F.grouped_mm(x, factor, offs=ends)
    spans = itertools.pairwise([0, *ends.tolist()])
    return torch.cat([x[start:end] @ factor[group] for group, (start, end) in enumerate(spans)])


def grouped_linear(
    x: Tensor,  # [rows, in], sorted by expert
    weight: Tensor,  # [experts, out, in]
    ends: Tensor,  # [experts]
    adapters: Factors | None = None,
    adapter_ends: Tensor | None = None,  # [groups of the adapters]; None: the groups are those of the experts
) -> Tensor:
    """Returns the linear layer of each row's expert [rows, out], with adapters in `wide_type`.

    Each of the two products is rounded to the type of `x`, and their sum is not.
    """
    base = grouped_product(x, weight.transpose(1, 2), ends)
    if adapters is None:
        return base
    own = ends if adapter_ends is None else adapter_ends
    added = grouped_product(grouped_product(x, adapters.a, own), adapters.b, own)
    return torch.add(base.to(wide_type(x.dtype)), added, alpha=adapters.scale)


def weighted_experts(
    x: Tensor,  # [T, width]
    ids: Tensor,  # [T, k], the experts of each token
    shares: Tensor,  # [T, k], their weights
    up: Tensor,  # [experts, 2 * inner, width]: gate and up
    down: Tensor,  # [experts, width, inner]
    activation: Callable[[Tensor], Tensor],
    up_adapters: Factors | None = None,
    down_adapters: Factors | None = None,
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts in `wide_type`. Differentiable."""
    chosen, wide = ids.shape[1], wide_type(x.dtype)
    order, ends = sort_into_groups(ids.reshape(-1), len(up))
    gate, value = grouped_linear(x[order // chosen], up, ends, up_adapters).chunk(2, -1)
    inner = (activation(gate.to(wide)) * value).to(x.dtype)
    made = grouped_linear(inner, down, ends, down_adapters)
    in_order = made[order.argsort()].view(*ids.shape, -1)
    return (in_order.to(wide) * shares[..., None].to(wide)).sum(1)
