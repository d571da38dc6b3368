"""The experts of a layer: each token through the few that its router chose, grouped by expert.

On a GPU, a decode step has kernels of its own (`expert_decode.py`). For more tokens, the pairs of token and expert are
sorted by expert, and each linear layer of all experts is one grouped product (`torch.nn.functional.grouped_mm`). Below
capability 9.0 torch asks the host for the sizes of the groups, so that the decode kernels serve all sizes there. Sizes
depend on the number of tokens alone and nothing is read by the host, so a step can be captured. On a CPU, each expert
that has tokens is a product of its own, and small groups are padded, so that a token's result does not depend on its
neighbours. Experts may have the adapters of several slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engines.native.kernels import expert_decode
from stretto.models.expert_kernels import combine, group
from stretto.models.expert_products import Factors, grouped_linear
from stretto.models.float32_products import wide_mm

Gate = Callable[..., Tensor]
"""`activation(gate) * up`: the function `gate` of the set of kernels."""


@functools.cache
def grouped_on_device(device: torch.device) -> bool:
    """True if grouped products run without the host, so that a step with them can be captured."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def choose_experts(x: Tensor, router: Tensor, chosen: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights [T, k] of each token's experts in float32, and their ids [T, k].

    `x` is [T, width], `router` [experts, width]. Logits are float32: rounded to half precision, they would be a large
    part of what the same experts differ by in engine and trainer.
    """
    logits = wide_mm(x, router.t())
    if x.is_cuda:
        return expert_decode.choose(logits, chosen, normalized=normalized)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    weights, ids = probabilities.topk(chosen, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights, ids


class SlotFactors(NamedTuple):
    """The adapters of all slots on one linear layer of all experts, by expert and then by slot."""

    a: Tensor  # [experts, slots, rank, in]
    b: Tensor  # [experts, slots, rank, out]


class ExpertAdapters(NamedTuple):
    """The adapters of a layer's experts, for the tokens of a forward."""

    up: SlotFactors | None  # None: not adapted
    down: SlotFactors | None
    slots: Tensor  # [T], the slot of each token
    scale: float

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        factors = self.up or self.down
        return 1 if factors is None else factors.a.shape[1]


def grouped_experts(
    x: Tensor,  # [T, width]
    ids: Tensor,  # [T, k]
    weights: Tensor,  # [T, k] float32
    up: Tensor,  # [experts, 2 * inner, width]: gate and up
    down: Tensor,  # [experts, width, inner]
    gate: Gate,
    activation: Any,  # as `gate` takes it
    padding: int,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts in float32. `padding` is not needed."""
    tokens, chosen = ids.shape
    few = expert_decode.tilings(tokens * chosen, len(up))
    if few is None and x.is_cuda and not grouped_on_device(x.device):
        few = expert_decode.TILINGS[-1][1:]
    if few is not None and adapters is None and x.is_cuda:
        return expert_decode.experts_of_few(x, ids, weights, up, down, activation, *few)
    inner, count = down.shape[2], 1 if adapters is None else adapters.num_slots
    groups = ids if adapters is None else ids * count + adapters.slots[:, None]
    order, place, group_ends = group(groups, len(up) * count)
    ends = group_ends[count - 1 :: count].contiguous()  # of the experts
    rows = x.index_select(0, order // chosen)
    both = grouped_linear(rows, up, ends, _factors(adapters, "up"), group_ends)
    out = None if both.dtype == x.dtype else x.new_empty(len(order), inner)
    gated = gate(both, inner, activation, order, None, 0, 1.0, out).to(x.dtype)
    made = grouped_linear(gated, down, ends, _factors(adapters, "down"), group_ends)
    return combine(made, weights, place, chosen)


def _factors(adapters: ExpertAdapters | None, name: Literal["up", "down"]) -> Factors | None:
    """Returns adapters as grouped products take them: each pair of expert and slot is a group."""
    own: SlotFactors | None = None if adapters is None else getattr(adapters, name)
    if adapters is None or own is None:
        return None
    return Factors(own.a.flatten(0, 1).transpose(1, 2), own.b.flatten(0, 1), adapters.scale)


def looped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Gate,
    activation: Any,
    padding: int,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Does the same as `grouped_experts` expert by expert. A group has at least `padding` rows."""
    tokens, chosen = ids.shape
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    owners = order // chosen
    rows = x.index_select(0, owners)
    slots = None if adapters is None else adapters.slots.index_select(0, owners)
    made, at = x.new_empty(len(order), x.shape[1], dtype=torch.float32), 0
    for expert, count in enumerate(torch.bincount(sorted_ids, minlength=up.shape[0]).tolist()):
        if not count:
            continue
        own, own_slots = rows[at : at + count], None if slots is None else slots[at : at + count]
        if count < padding:
            own = torch.cat((own, own.new_zeros(padding - count, own.shape[1])))
            own_slots = None if own_slots is None else F.pad(own_slots, (0, padding - count))
        both = _slotted(own, up[expert], expert, own_slots, adapters, "up")
        gated = gate(both, down.shape[2], activation, order[:count], (None, None), 0, 1.0).to(x.dtype)
        made[at : at + count] = _slotted(gated, down[expert], expert, own_slots, adapters, "down")[:count]
        at += count
    made *= weights.reshape(-1).index_select(0, order)[:, None]
    return torch.empty_like(made).index_copy_(0, order, made).view(tokens, chosen, -1).sum(1)


def _slotted(
    x: Tensor,
    weight: Tensor,
    expert: int,
    slots: Tensor | None,
    adapters: ExpertAdapters | None,
    name: Literal["up", "down"],
) -> Tensor:
    """Returns a linear layer of one expert [rows, out], with each row's own adapter in float32."""
    base = F.linear(x, weight)
    own: SlotFactors | None = None if adapters is None else getattr(adapters, name)
    if adapters is None or own is None or slots is None:
        return base
    narrow = F.linear(x, own.a[expert].flatten(0, 1))
    columns = torch.arange(own.a.shape[1]).repeat_interleave(own.a.shape[2])
    narrow.masked_fill_(slots[:, None] != columns, 0.0)
    return torch.add(base.float(), torch.mm(narrow, own.b[expert].flatten(0, 1)), alpha=adapters.scale)
