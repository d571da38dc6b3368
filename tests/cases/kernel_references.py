"""The kernels of the native engine in plain torch: the definition of what each computes, and a set that tests run
the steps of a GPU on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, check_plan
from stretto.engines.native.kernels.experts import looped_experts
from stretto.engines.native.kernels.kernel_set import TRITON, PagedKernels
from stretto.engines.native.kernels.layers import check_activation
from stretto.engines.native.kernels.prefill_attention import DenseGroup
from stretto.engines.native.sampling import sample, uniforms


def _adapted(y: Tensor, h: Tensor, slots: Tensor, b: Tensor | None, rank: int, scale: float) -> Tensor:
    """`y` [tokens, out] with the product of each token's own part of `h` [tokens, num_slots * rank] added; float32."""
    if b is None:
        return y.float()
    own = h.to(b.dtype).float().gather(1, slots[:, None] * rank + torch.arange(rank, device=h.device))
    factors = b.float().reshape(-1, rank, b.shape[1]).index_select(0, slots)
    return y.float() + scale * torch.bmm(own.unsqueeze(1), factors).squeeze(1)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()


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
    if added is not None:
        y, h = added.tensor_split([stream.shape[1]], 1)
        stream.add_(_adapted(y, h, slots, b, rank, scale))
    out = torch.empty_like(stream, dtype=weight.dtype) if out is None else out
    return out.copy_(_norm(stream, weight, epsilon))


def split_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    size: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    bs: tuple[Tensor | None, Tensor | None, Tensor | None] | None,
    rank: int,
    scale: float,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_out: Tensor | None = None,
) -> Tensor:
    widths = (heads * size, kv_heads * size, kv_heads * size)
    *parts, h = qkv.split_with_sizes((*widths, qkv.shape[1] - sum(widths)), 1)
    factors = bs or (None, None, None)
    hs = h.chunk(3, 1)
    q, k, v = (
        _adapted(y, own, slots, b, rank, scale).reshape(qkv.shape[0], -1, size)
        for y, own, b in zip(parts, hs, factors, strict=True)
    )
    cos, sin = cos_sin.index_select(0, positions).float().unsqueeze(1).chunk(2, -1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else _norm(x, weight, epsilon)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    q_out = torch.empty_like(q, dtype=qkv.dtype) if q_out is None else q_out
    q_out.copy_(turned(q, q_weight))
    keys.index_copy_(0, write_slots, turned(k, k_weight).to(keys.dtype))
    values.index_copy_(0, write_slots, v.to(values.dtype))
    return q_out


def gate(
    gate_up: Tensor,
    width: int,
    activation: str,
    slots: Tensor,
    bs: tuple[Tensor | None, Tensor | None] | None,
    rank: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    check_activation(activation)
    gated, up, h = gate_up.split_with_sizes((width, width, gate_up.shape[1] - 2 * width), 1)
    h_gate, h_up = h.chunk(2, 1)
    b_gate, b_up = bs or (None, None)
    gated = _adapted(gated, h_gate, slots, b_gate, rank, scale)
    up = _adapted(up, h_up, slots, b_up, rank, scale)
    if activation == "silu":
        active = F.silu(gated)
    else:
        active = F.gelu(gated, approximate="tanh" if activation == "gelu_tanh" else "none")
    out = gate_up.new_empty(up.shape) if out is None else out
    return out.copy_(active * up)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    contexts: Tensor,
    plan: DecodePlan,
    chunk: int,
    max_items: int,
    scale: float,
    out: Tensor,
    sharing: Sharing | None = None,
) -> Tensor:
    """What `paged_decode` computes, row by row in float32. It needs the table and the contexts alone."""
    for row, context in enumerate(contexts.tolist()):
        slots = context_slots(table[row], context)
        out[row] = dense_attention(q[row, None], keys[slots], values[slots], scale)[0].to(out.dtype)
    return out


def context_slots(pages: Tensor, context: int) -> Tensor:
    """The cache slots [context] of the first `context` positions of a row of a table."""
    positions = torch.arange(context, device=pages.device)
    return pages[positions // PAGE].long() * PAGE + positions % PAGE


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention in float32 of the last positions of one sequence: `q` [tokens, heads, size], its keys and
    values [context, kv heads, size]; [tokens, heads, size]."""
    tokens, heads, context = q.shape[0], q.shape[1], keys.shape[0]
    group = heads // keys.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("mhd,nhd->hmn", q.float(), key) * scale
    visible = torch.ones(tokens, context, dtype=torch.bool, device=q.device).tril(context - tokens)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, value)


def paged_extend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    offsets: Tensor,
    longest_chunk: int,
    scale: float,
    out: Tensor,
) -> Tensor:
    """What `paged_extend` computes, chunk by chunk in float32."""
    bounds = offsets.tolist()
    for chunk, start in enumerate(starts.tolist()):
        begin, end = bounds[chunk], bounds[chunk + 1]
        slots = context_slots(table[chunk], start + end - begin)
        result = dense_attention(q[begin:end], keys[slots], values[slots], scale)
        out[begin:end] = result.to(out.dtype)
    return out


def dense_causal(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    groups: Sequence[DenseGroup],
    scale: float,
    out: Tensor,
) -> Tensor:
    """What `dense_causal` computes, sequence by sequence in float32."""
    for group in groups:
        begin = group.begin
        for length in group.lengths:
            own = slice(begin, begin + length)
            out[own] = dense_attention(q[own], keys[slots[own]], values[slots[own]], scale).to(out.dtype)
            begin += length
    return out


def plan_items(plan: DecodePlan, contexts: Tensor, chunk: int, max_items: int, sharing: Sharing | None = None) -> None:
    """What `plan_items` does, in plain torch."""
    rows = contexts.shape[0]
    if max_items == rows:
        return
    check_plan(plan, rows, chunk, max_items)
    shared = torch.zeros_like(contexts) if sharing is None else sharing.pages * PAGE
    counts = (shared + chunk - 1) // chunk + (contexts - shared + chunk - 1) // chunk
    plan.first_item[0] = 0
    plan.first_item[1 : rows + 1] = counts.cumsum(0)
    row = torch.repeat_interleave(torch.arange(rows, device=contexts.device), counts)
    index = torch.arange(row.shape[0], device=contexts.device) - plan.first_item[:-1].long()[row]
    listed = min(max_items, row.shape[0])
    plan.item_row[:listed], plan.item_chunk[:listed] = row[:listed], index[:listed]


def draw(
    logits: Tensor,
    temperature: Tensor,
    mixed_seeds: Tensor,
    positions: Tensor,
    tokens_out: Tensor,
    logprobs_out: Tensor,
    workspace: Tensor,
) -> None:
    """The twin of `draw`; it needs no workspace."""
    tokens, logprobs, _ = sample(logits, uniforms(mixed_seeds, positions), temperature, None, any_greedy=True)
    tokens_out.copy_(torch.where(logprobs.isnan(), 0, tokens))
    logprobs_out.copy_(logprobs)


REFERENCE = replace(
    TRITON,
    add_norm=add_norm,
    split_heads=split_heads,
    gate=gate,
    experts=looped_experts,
    expert_dtypes=frozenset({torch.float32, torch.bfloat16}),
    paged=PagedKernels(draw, plan_items, paged_decode, paged_extend, dense_causal),
)
