"""The experts of a layer: each token through the few that its router chose, grouped by expert.

On a GPU, the pairs of token and expert are sorted by expert, and each linear layer of all experts is one grouped
product (`torch.nn.functional.grouped_mm`). Sizes depend on the number of tokens alone and nothing is read by the host,
so a step can be captured. On a CPU, each expert that has tokens is a product of its own, and small groups are padded,
so that a token's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Gate = Callable[..., Tensor]
"""`activation(gate) * up`: the function `gate` of the set of kernels."""


def choose_experts(x: Tensor, router: Tensor, chosen: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights [T, k] of each token's experts in float32, and their ids [T, k].

    `x` is [T, width], `router` [experts, width]. Logits are rounded as in transformers.
    """
    probabilities = F.linear(x, router).softmax(-1, dtype=torch.float32)
    weights, ids = probabilities.topk(chosen, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights, ids


def grouped_experts(
    x: Tensor,  # [T, width]
    ids: Tensor,  # [T, k]
    weights: Tensor,  # [T, k] float32
    up: Tensor,  # [experts, 2 * inner, width]: gate and up
    down: Tensor,  # [experts, width, inner]
    gate: Gate,
    activation: Any,  # as `gate` takes it
    padding: int,
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts in float32. `padding` is not needed."""
    tokens, chosen = ids.shape
    experts = torch.arange(up.shape[0], device=x.device)
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)  # where the group of each expert ends
    rows = x.index_select(0, order // chosen)
    both = F.grouped_mm(rows, up.transpose(1, 2), offs=ends)
    gated = gate(both, down.shape[2], activation, order, None, 0, 1.0)
    made = F.grouped_mm(gated, down.transpose(1, 2), offs=ends).float()
    made *= weights.reshape(-1).index_select(0, order)[:, None]
    # Back in the order of the tokens, so that a sum has its terms in the order of their ids' places.
    return torch.empty_like(made).index_copy_(0, order, made).view(tokens, chosen, -1).sum(1)


def looped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Gate, activation: Any, padding: int
) -> Tensor:
    """Does the same as `grouped_experts` expert by expert, in the type of `x`. A group has at least `padding` rows."""
    tokens, chosen = ids.shape
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    rows = x.index_select(0, order // chosen)
    made, at = x.new_empty(len(order), x.shape[1]), 0
    for expert, count in enumerate(torch.bincount(sorted_ids, minlength=up.shape[0]).tolist()):
        if not count:
            continue
        own = rows[at : at + count]
        if count < padding:
            own = torch.cat((own, own.new_zeros(padding - count, own.shape[1])))
        both = F.linear(own, up[expert])
        gated = gate(both, down.shape[2], activation, order[:count], (None, None), 0, 1.0)
        made[at : at + count] = F.linear(gated, down[expert])[:count]
        at += count
    made *= weights.reshape(-1).index_select(0, order)[:, None].to(made.dtype)
    return torch.empty_like(made).index_copy_(0, order, made).view(tokens, chosen, -1).sum(1)
