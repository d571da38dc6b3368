"""The operations of a plain decoder between its products, in plain torch and in as few calls as possible.

A decode step of a small model on a CPU is bound by the number of its operations, not by their size. The signatures are
those of `layers.py`. The adapters are applied in the products (`JoinedProduct`), so nothing of them arrives here, and
the products have added themselves to the residual stream. Values are rounded where the kernels of a GPU round them: the
input of a product or of attention to the type of the weights, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engines.native.lora_slots import SlotMask


def activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the activation of a feed-forward as `gate` takes it."""
    return F.silu if isinstance(module, nn.SiLU) else module


def prepare(rotary: Tensor, positions: Tensor, slots: Tensor, mask: SlotMask | None) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines [tokens, size] of a forward, and tells the products the slot of each token."""
    if mask is not None:
        mask.choose(slots)
    cos, sin = rotary.index_select(0, positions).chunk(2, 1)
    return cos, sin


@functools.cache
def _constant(value: float) -> Tensor:
    return torch.full((1,), value)


def _inverse_norm(x: Tensor, epsilon: float) -> Tensor:
    """Returns the factor [..., 1] that brings each vector to a mean square of one."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(epsilon), norm, norm, value=1.0 / x.size(-1)).rsqrt_()


def add_norm(
    stream: Tensor,
    added: Tensor | None,
    weight: Tensor,
    epsilon: float,
    slots: Tensor,
    b: Tensor | None,
    rank: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Adds the output of experts to the stream; returns its norm in the type of `weight`.

    Five small operations are faster than the call for it.
    """
    if added is not None:
        stream += added
    x = torch.mul(stream, _inverse_norm(stream, epsilon)).mul_(weight)
    return x if x.dtype == weight.dtype else x.to(weight.dtype)


def split_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    size: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    angles: tuple[Tensor, Tensor],  # of `prepare`
    positions: Tensor,
    slots: Tensor,
    bs: tuple[Tensor | None, ...],
    rank: int,
    scale: float,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_out: Tensor | None = None,
) -> Tensor:
    """Returns q [tokens, heads, size] after norm and rotation; k and v go into the cache."""
    tokens, both = qkv.shape[0], heads + kv_heads
    qk, v = qkv.split_with_sizes((both * size, kv_heads * size), 1)
    x = qk.view(tokens, both, size).transpose(0, 1)  # [heads and kv heads, tokens, size]
    if x.dtype != torch.float32:
        x = x.float()
    if q_weight is not None:
        x = x * _inverse_norm(x, epsilon)
    x = x.contiguous()
    q, k = x.split_with_sizes((heads, kv_heads))
    if q_weight is not None and k_weight is not None:
        q.mul_(q_weight)
        k.mul_(k_weight)
    turned = x.roll(size // 2, -1)
    x.mul_(angles[0]).addcmul_(turned, angles[1])
    if x.dtype != qkv.dtype:
        q, k = x.to(qkv.dtype).split_with_sizes((heads, kv_heads))
    keys.index_copy_(0, write_slots, k.transpose(0, 1).to(keys.dtype))
    values.index_copy_(0, write_slots, v.view(tokens, kv_heads, size).to(values.dtype))
    return q.transpose(0, 1)


def gate(
    gate_up: Tensor,
    width: int,
    activation: Callable[[Tensor], Tensor],
    slots: Tensor,
    bs: tuple[Tensor | None, ...],
    rank: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Returns `activation(gate) * up`."""
    gated, up = gate_up.chunk(2, 1)
    if gated.dtype != torch.float32:
        return activation(gated.float()).mul_(up).to(gated.dtype)
    return activation(gated).mul_(up)
