"""Causal attention over packed sequences, as one operator that is opaque to `torch.compile`.

On CUDA it is the variable-length flash attention that PyTorch ships, called by its ATen names. The public `varlen_attn`
calls these; they accept fewer key heads than query heads, and their signature is the same in every version since 2.10
(that of `varlen_attn` is not). Everywhere else it is a loop over the sequences: the reference, which tests of compiled
layers also use.

Sequences may continue a prefix that others continue too (`varlen_layout.py`). Keys and values are expanded inside the
operator, again in the backward pass, so no copy of a prefix is kept.

The longest length, the number of keys and that of copies are a tensor on the host. As numbers they would be constants
of a compiled graph, and each new one would compile again. The longest length is an upper bound: blocks of queries
beyond a sequence's end return at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import library

from stretto.models.float32_products import HALF, wide_type
from stretto.models.varlen_copies import expanded, reduced

MAX_HEAD_SIZE = 256


def flash_fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """True if flash attention supports this device, type and head size."""
    return device.type == "cuda" and dtype in HALF and head_size <= MAX_HEAD_SIZE and head_size % 8 == 0


@library.custom_op(
    "stretto::causal_varlen",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor ends, Tensor copies, Tensor sizes, float scale) "
    "-> (Tensor, Tensor)",
)
def causal_varlen(
    query: torch.Tensor,  # [T, heads, head size]
    key: torch.Tensor,  # [T, kv heads, head size]
    value: torch.Tensor,
    ends: torch.Tensor,  # this and the next two are those of `VarlenLayout`
    copies: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each sequence's attention [T, heads, head size] and its normalizers [heads, T] float32.

    A token attends to the prefix of its sequence, to the tokens before it, and to itself.
    """
    limit, num_keys, _ = sizes.tolist()
    if num_keys:
        key, value = expanded(key, value, copies, num_keys)
    if not query.is_cuda:
        return _reference(query, key, value, ends, scale)
    out, normalizers, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends[0], ends[1], limit, limit, 0.0, True, False, scale=scale
    )
    return out.contiguous(), normalizers  # it has the strides of the query; the fake is contiguous


@causal_varlen.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    copies: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty((query.shape[1], query.shape[0]), dtype=torch.float32, device=query.device)


@library.custom_op(
    "stretto::causal_varlen_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor normalizers, Tensor ends, "
    "Tensor copies, Tensor sizes, float scale) -> (Tensor, Tensor, Tensor)",
)
def causal_varlen_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    normalizers: torch.Tensor,
    ends: torch.Tensor,
    copies: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value."""
    limit, num_keys, most = sizes.tolist()
    if num_keys:
        key, value = expanded(key, value, copies, num_keys)
    if query.is_cuda:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, normalizers, ends[0], ends[1], limit, limit, 0.0, True,
            state, torch.empty(0, device=query.device), scale=scale,
        )  # fmt: skip
    else:
        grads = _reference_backward(grad, query, key, value, ends, scale)
    # The fake is contiguous, and an operator must not return the same memory twice.
    query_grad, key_grad, value_grad = (each.contiguous() for each in grads)
    if num_keys:
        key_grad, value_grad = reduced(key_grad, value_grad, len(query), copies, most)
    return query_grad, key_grad, value_grad


@causal_varlen_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    normalizers: torch.Tensor,
    ends: torch.Tensor,
    copies: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_grad, key_grad, value_grad = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
    )
    return query_grad, key_grad, value_grad


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ends, copies, sizes, scale = inputs
    ctx.save_for_backward(query, key, value, ends, copies, sizes, *output)
    ctx.scale = scale


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, ends, copies, sizes, out, normalizers = ctx.saved_tensors
    grads = causal_varlen_backward(grad, query, key, value, out, normalizers, ends, copies, sizes, ctx.scale)
    return (*grads, None, None, None, None)


causal_varlen.register_autograd(_backward, setup_context=_keep)


def _spans(ends: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Iterates over the sequences: the places of their tokens, and of their keys."""
    tokens, keys = (itertools.pairwise(each) for each in ends.tolist())
    return ((slice(*own), slice(*seen)) for own, seen in zip(tokens, keys, strict=True))


def _later(queries: int, keys: int) -> torch.Tensor:
    """The keys that a query must not see: it has one own key, and those before that are earlier."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one sequence at a time. The normalizers are zeros: the backward pass does not use them."""
    parts = []
    for own, seen in _spans(ends):
        q, k, v = (each.transpose(0, 1) for each in (query[own], key[seen], value[seen]))
        whole = q.shape[1] == k.shape[1]
        mask = None if whole else ~_later(q.shape[1], k.shape[1])
        parts.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=True))
    out = torch.cat(parts, dim=1).transpose(0, 1).contiguous()
    return out, torch.zeros((query.shape[1], query.shape[0]), dtype=torch.float32, device=query.device)


def _reference_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the gradients by formula: inside an operator there is no automatic differentiation.

    In half precision it computes in float32, as flash attention does.
    """
    wide = wide_type(query.dtype)
    grads = tuple(torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    for own, seen in _spans(ends):
        q, upstream = (each[own].transpose(0, 1).to(wide) for each in (query, grad))
        k, v = (each[seen].transpose(0, 1).to(wide).repeat_interleave(shared, 0) for each in (key, value))
        later = _later(q.shape[1], k.shape[1])
        chances = (q @ k.transpose(1, 2) * scale).masked_fill(later, float("-inf")).softmax(-1)
        chances_grad = upstream @ v.transpose(1, 2)
        scores_grad = chances * (chances_grad - (chances_grad * chances).sum(-1, keepdim=True)) * scale
        parts = scores_grad @ k, scores_grad.transpose(1, 2) @ q, chances.transpose(1, 2) @ upstream
        for whole, part, places in zip(grads, parts, (own, seen, seen), strict=True):
            # The gradients of query heads that share a key head are summed.
            summed = part.unflatten(0, (whole.shape[1], -1)).sum(1)  # type: ignore[no-untyped-call]
            whole[places] = summed.transpose(0, 1)
    return grads[0], grads[1], grads[2]
