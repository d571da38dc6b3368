"""Attention for TRL's asynchronous trainer on a host without the hub.

That trainer packs samples into a tree and calls one function of FlashAttention 3, `flash_attn_varlen_func`, from a
kernel that the `kernels` package downloads from the hub. Here is the same function from what PyTorch ships: on CUDA
its variable-length flash attention (FlashAttention 2), called by its ATen names, whose signature is the same in every
version since 2.10; elsewhere a loop, which is also what the other is checked against.

A sequence may have fewer queries than keys. Its queries are then the last ones: the mask is aligned at the end.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NAME = "PyTorch's flash attention"
HUB = "kernels-community/flash-attn3"


class _Flash(torch.autograd.Function):
    """Causal attention over packed sequences by PyTorch's flash attention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        scale: float,
    ) -> torch.Tensor:
        out, normalizers, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, ends_q, ends_k, longest_q, longest_k, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, ends_q, ends_k, out, normalizers)
        ctx.longest, ctx.scale = (longest_q, longest_k), scale
        made: torch.Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, ends_q, ends_k, out, normalizers = ctx.saved_tensors
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, normalizers, ends_q, ends_k, *ctx.longest, 0.0, True,
            state, torch.empty(0, device=query.device), scale=ctx.scale,
        )  # fmt: skip
        return (*grads, None, None, None, None, None)


def by_loop(
    query: torch.Tensor,  # [queries, heads, head size]
    key: torch.Tensor,  # [keys, kv heads, head size]
    value: torch.Tensor,
    ends_q: torch.Tensor,  # 0, then the end of each sequence's queries
    ends_k: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same, one sequence at a time."""
    parts = []
    spans = zip(itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in spans:
        q = query[q_start:q_end].transpose(0, 1)
        k, v = (each[k_start:k_end].transpose(0, 1) for each in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=1).transpose(0, 1)


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **other: Any,
) -> torch.Tensor:
    """The function that TRL calls."""
    if not causal or tuple(window_size) != (-1, -1) or other:
        raise NotImplementedError("only causal attention without a window or a cap: `--attention hub` has the rest")
    scale = softmax_scale if softmax_scale is not None else float(query.shape[-1]) ** -0.5
    if query.is_cuda:
        out: torch.Tensor = _Flash.apply(query, key, value, ends_q, ends_k, longest_q, longest_k, scale)
        return out
    return by_loop(query, key, value, ends_q, ends_k, scale)


def difference(device: str, dtype: torch.dtype, head_size: int = 64) -> float:
    """How far result and gradients are from those of the loop, at most, as a share of the largest value."""
    generator = torch.Generator().manual_seed(0)
    ends_q = torch.tensor([0, 5, 6, 45, 109], dtype=torch.int32, device=device)
    ends_k = torch.tensor([0, 5, 26, 165, 229], dtype=torch.int32, device=device)  # the second and third have a past
    shapes = [(109, 4, head_size), (229, 2, head_size), (229, 2, head_size), (109, 4, head_size)]
    *inputs, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)

    def computed(by: Callable[[list[torch.Tensor]], torch.Tensor], kind: torch.dtype) -> list[torch.Tensor]:
        given = [each.to(kind).requires_grad_() for each in inputs]
        out = by(given)
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(kind))]

    def plain(given: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = given
        return by_loop(query, key, value, ends_q, ends_k, float(head_size) ** -0.5)

    def flash(given: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = given
        return flash_attn_varlen_func(query, key, value, ends_q, ends_k, 64, 139, causal=True)

    right, made = computed(plain, torch.float32), computed(flash, dtype)
    return max(float((a - b.float()).abs().max() / a.abs().max()) for a, b in zip(right, made, strict=True))


def install(device: str, dtype: torch.dtype) -> None:
    """Takes the place of the hub's kernel in TRL, if it computes the same as the loop."""
    if (error := difference(device, dtype)) > 0.05:
        raise RuntimeError(f"{NAME} is {error:.2g} away from a plain computation: it cannot stand in for `{HUB}`")
    from trl.experimental.async_grpo import packing

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
