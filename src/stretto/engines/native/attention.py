"""Attention over the paged cache, registered with transformers under `stretto_paged`.

A forward runs all tokens of a step as one sequence [1, tokens]; what belongs together is in the `Plan`. First come the
*listed* tokens (decoding rows, short prompts, filling rows): each has a list of the cache slots that it attends to. The
lists of all tokens are one sparse pattern: scores are a sampled product over it, the output a weighted bag over the
values. Nothing is padded to the longest row, and each token's arithmetic is its own, whoever stands beside it. Then
come the chunks of long prompts, each over its own context with dense attention.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from stretto.engines.native.cache import KVCache
from stretto.errors import ModelError

NAME = "stretto_paged"
SHORT = 64  # a chunk that ends at or before this position is listed token by token: cheaper than a call of its own


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of one sequence that are prefilled in this step."""

    tokens: Tensor  # [end - start]
    slots: Tensor  # [end] int32, where the sequence lives in the cache
    start: int
    end: int
    weights_slot: int
    last: bool  # its last token's logits are wanted

    @property
    def short(self) -> bool:
        return self.end <= SHORT


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward: its tokens in order (listed ones, then long chunks), and what each attends to."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    write_slots: Tensor  # [tokens] int64
    weights_slots: Tensor  # [tokens] int64: whose weights each token runs under
    ends: tuple[int, ...]  # where the last token of each chunk is, in the order in which the chunks were given
    num_listed: int
    row_of_entry: Tensor  # [entries] int64: the listed token that an entry of the pattern belongs to
    columns: Tensor  # [heads * entries] int32, rows of the cache seen as [slots * kv heads, head size]
    offsets: Tensor  # [heads * listed + 1] int32
    pattern: Tensor  # the sparse pattern, without values
    long: tuple[Chunk, ...]


class Planner:
    """Builds plans; holds the index tensors that all of them need."""

    def __init__(self, cache: KVCache, heads: int) -> None:
        device = cache.storage.device
        self._cache, self._heads = cache, heads
        group = heads // cache.kv_heads
        self._kv_head = (torch.arange(heads, dtype=torch.int32, device=device) // group)[:, None]
        # Entry lists of the positions 0, 1, 2 ... of a short sequence, one after the other.
        self._triangle = torch.cat([torch.arange(i + 1) for i in range(SHORT)]).to(device)
        self._numbers = torch.arange(SHORT + 1, dtype=torch.int64, device=device)
        self._counting = self._nothing = torch.empty(0)
        self._reserve(1024)
        with warnings.catch_warnings():
            # Torch says once that sparse CSR is in beta; what is used of it is compared with dense attention later.
            warnings.simplefilter("ignore", UserWarning)
            torch.sparse_csr_tensor(self._numbers[:2], self._numbers[:1], torch.zeros(1, device=device), (1, 1))

    def plan(
        self,
        tokens: Tensor,
        contexts: Tensor,
        weights_slots: Tensor,
        rows: Tensor,
        cells: Tensor,
        entries: int,
        chunks: Sequence[Chunk],
        filling: int,
    ) -> Plan:
        """The plan of decoding rows, of chunks and of `filling` rows.

        A decoding row is its last token, its tokens of context with it, whose weights it runs under, and its row in the
        table `cells`, which has the cache slot of each of its positions; `entries` is the sum of the contexts.
        """
        num_rows = tokens.shape[0]
        positions = contexts - 1
        starts, flat = rows * cells.shape[1], cells.view(-1)
        writes = flat.index_select(0, starts + positions).long()
        short = [chunk for chunk in chunks if chunk.short]
        long = tuple(chunk for chunk in chunks if not chunk.short)
        lengths, lists = contexts, []
        if chunks or filling:
            zero = self._numbers[:1].expand(filling)
            lists = [c.slots[self._triangle[c.start * (c.start + 1) // 2 : c.end * (c.end + 1) // 2]] for c in short]
            lists.append(zero.int())
            lengths = torch.cat([contexts, *(self._numbers[c.start + 1 : c.end + 1] for c in short), zero + 1])

            def all_tokens(of_rows: Tensor, of: Callable[[Chunk], Tensor]) -> Tensor:
                return torch.cat([of_rows, *(of(c) for c in short), zero, *(of(c) for c in long)])

            tokens = all_tokens(tokens, lambda c: c.tokens)
            positions = all_tokens(positions, lambda c: torch.arange(c.start, c.end, device=zero.device))
            writes = all_tokens(writes, lambda c: c.slots[c.start :])
            weights_slots = all_tokens(weights_slots, lambda c: zero.new_full((c.end - c.start,), c.weights_slot))
        ends, at = {}, num_rows
        for chunk in (*short, *long):
            at += chunk.end - chunk.start + (filling if long and chunk is long[0] else 0)
            ends[id(chunk)] = at - 1
        last = tuple(ends[id(chunk)] for chunk in chunks)
        total = entries + sum(part.shape[0] for part in lists)
        self._reserve(total)
        offsets = torch.cat((self._numbers[:1], *(lengths,) * self._heads)).cumsum(0, dtype=torch.int32)
        row_of_entry = torch.repeat_interleave(lengths, output_size=total)
        place = (starts - offsets[:num_rows]).index_select(0, row_of_entry[:entries]).add_(self._counting[:entries])
        slots = flat.index_select(0, place)
        if lists:
            slots = torch.cat([slots, *lists])
        columns = torch.add(self._kv_head, slots, alpha=self._cache.kv_heads).view(-1)
        size = (offsets.shape[0] - 1, self._cache.storage.shape[2] * self._cache.kv_heads)
        nothing = self._nothing[: columns.shape[0]]
        pattern = torch.sparse_csr_tensor(offsets, columns, nothing, size, check_invariants=False)
        listed = lengths.shape[0]
        return Plan(
            tokens, positions, writes, weights_slots, last, listed, row_of_entry, columns, offsets, pattern, long
        )

    def _reserve(self, entries: int) -> None:
        """Grow what is as long as the lists by doubling."""
        if entries > self._counting.shape[0]:
            size = max(entries, 2 * self._counting.shape[0])
            self._counting = torch.arange(size, device=self._numbers.device)
            storage = self._cache.storage
            self._nothing = torch.zeros(self._heads * size, dtype=storage.dtype, device=storage.device)


Attend = Callable[[int, Tensor, Tensor, float], None]
"""Attention of one layer over what is cached: (layer, q [tokens, heads, size], out of the same shape, scale)."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What the tokens of a forward on a device attend to: where theirs go, and how the cache is read."""

    write_slots: Tensor  # [tokens] int64
    attend: Attend


@dataclass(slots=True)
class Attention:
    """What the attention function finds on a module of an engine's tree. One engine thread uses it at a time."""

    cache: KVCache | None = None
    plan: Plan | None = None
    step: DeviceStep | None = None  # instead of a plan, where kernels read the cache
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> heads, kv heads, head size


def attend(tree: nn.Module, attention: Attention) -> None:
    """Let every attention layer of `tree` use `attention`. The tree's configs are its own."""
    for module in tree.modules():
        if hasattr(module, "layer_idx"):
            module.stretto_attention = attention  # type: ignore[assignment]
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME


def _refuse(module: nn.Module, what: str) -> ModelError:
    model_type = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return ModelError(f"the native engine does not serve `{model_type}`: {what}")


def _check(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if kwargs.get("sliding_window") is not None:
        raise _refuse(module, f"its attention has `sliding_window = {kwargs['sliding_window']}`")
    if kwargs.get("softcap") is not None:
        raise _refuse(module, f"its attention has `softcap = {kwargs['softcap']}`")
    if kwargs.get("s_aux") is not None:
        raise _refuse(module, "its attention has sinks (`s_aux`)")
    if mask is not None or kwargs.get("position_bias") is not None:
        raise _refuse(module, "its attention brings a mask or a bias of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _refuse(module, "its attention is not causal")


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head size]
    key: Tensor,  # [1, kv heads, tokens, head size]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values of the step's tokens into the cache and attend; [1, tokens, heads, head size]."""
    _check(module, attention_mask, kwargs)
    attention = getattr(module, "stretto_attention", None)
    if attention is None:
        raise _refuse(module, "its attention layers have no `layer_idx`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if attention.cache is None:
        if value.shape != key.shape:
            raise _refuse(module, "its keys and values differ in size")
        attention.seen[layer] = (query.shape[1], key.shape[1], key.shape[-1])
        dense = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return dense.transpose(1, 2), None
    own_keys, own_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if attention.step is None:
        return attend_paged(attention, layer, query[0], own_keys, own_values, scale).unsqueeze(0), None
    keys, values = attention.cache.of_layer[layer]
    keys.index_copy_(0, attention.step.write_slots, own_keys)
    values.index_copy_(0, attention.step.write_slots, own_values)
    out = own_keys.new_empty(query.shape[2], query.shape[1], query.shape[3])
    attention.step.attend(layer, query[0].transpose(0, 1), out, scale)
    return out.unsqueeze(0), None


def attend_paged(
    attention: Attention,
    layer: int,
    query: Tensor,  # [heads, tokens, head size]
    key: Tensor,  # [tokens, kv heads, head size]
    value: Tensor,
    scale: float,
) -> Tensor:
    """Write keys and values of the plan's tokens into the cache and attend; [tokens, heads, head size]."""
    plan, cache = attention.plan, attention.cache
    assert plan is not None
    assert cache is not None
    keys, values = cache.of_layer[layer]
    dtype = keys.dtype
    keys.index_copy_(0, plan.write_slots, key.to(dtype))
    values.index_copy_(0, plan.write_slots, value.to(dtype))
    own = query[:, : plan.num_listed] if plan.long else query
    listed = _listed(plan, own.to(dtype), keys, values, scale)
    if plan.long:
        parts, at = [listed], plan.num_listed
        for chunk in plan.long:
            size = chunk.end - chunk.start
            parts.append(_dense(chunk, query[None, :, at : at + size].to(dtype), keys, values, scale))
            at += size
        listed = torch.cat(parts)
    return listed.to(query.dtype)


def _listed(plan: Plan, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the listed tokens, [listed, heads, head size]."""
    heads, listed, size = query.shape
    if not listed:
        return query.transpose(0, 1)
    flat = query.reshape(heads * listed, size)
    scores = torch.sparse.sampled_addmm(plan.pattern, flat, keys.view(-1, size).t(), beta=0.0, alpha=scale).values()
    scores = scores.view(heads, -1)
    index = plan.row_of_entry.expand_as(scores)
    peak = scores.new_full((heads, listed), -math.inf).scatter_reduce_(1, index, scores, "amax")
    scores = scores.sub_(peak.index_select(1, plan.row_of_entry)).exp_()
    total = torch.segment_reduce(scores.view(-1), "sum", offsets=plan.offsets, unsafe=True)
    bags = torch.embedding_bag(
        values.view(-1, size), plan.columns, plan.offsets, False, 0, False, scores.view(-1), True
    )[0]
    return bags.div_(total.unsqueeze(-1)).view(heads, listed, size).transpose(0, 1)


def _dense(chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of a chunk over its own sequence, [end - start, heads, head size]."""
    group = query.shape[1] // keys.shape[1]
    key = keys.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(group, dim=0)
    value = values.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(group, dim=0)
    mask = None
    if chunk.start:
        mask = torch.ones(chunk.end - chunk.start, chunk.end, dtype=torch.bool, device=query.device).tril(chunk.start)
    out = F.scaled_dot_product_attention(
        query, key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
