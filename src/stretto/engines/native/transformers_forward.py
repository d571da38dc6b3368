"""The forward of any architecture: transformers' own modules over the paged cache.

For models that are not plain decoders. It takes more launches than the fused forward,
and has the same cache, slots, graphs and draws. A forward runs all tokens of a step as one sequence [1, tokens]; the
attention function is registered with transformers under `stretto_paged`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from stretto.engines.native.cache import KVCache
from stretto.engines.native.decoder_protocol import Attend
from stretto.engines.native.expert_slots import SlottedExperts, expert_layers
from stretto.engines.native.lora_slots import SlotMask, SlottedLinear
from stretto.engines.native.versions import Slots
from stretto.errors import ModelError
from stretto.models.module_forward import run_modules
from stretto.models.routing import RoutingTap

NAME = "stretto_paged"


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The cache slots of the tokens of a forward, and their attention over the cache."""

    writes: Tensor  # [tokens] int64
    attend: Attend


@dataclass(slots=True)
class Attention:
    """The state that the attention function finds on the modules of an engine. One thread uses it at a time."""

    cache: KVCache | None = None
    step: AttentionStep | None = None
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> heads, kv heads, head size


def use_paged_attention(tree: nn.Module, attention: Attention) -> None:
    """Lets every attention layer of `tree` use `attention`. The tree's configs are its own."""
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
    """Writes keys and values of the step's tokens into the cache and attends; returns [1, tokens, heads, head size].

    Without a cache it attends densely and notes the shapes of the layer.
    """
    _check(module, attention_mask, kwargs)
    attention: Attention | None = getattr(module, "stretto_attention", None)
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
    step = attention.step
    assert step is not None
    keys, values = attention.cache.of_layer[layer]
    keys.index_copy_(0, step.writes, key[0].transpose(0, 1).to(keys.dtype))
    values.index_copy_(0, step.writes, value[0].transpose(0, 1).to(values.dtype))
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    return step.attend(layer, query[0].transpose(0, 1), out, scale).unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)


class StockDecoder:
    """The forward of one tree; called like `FusedDecoder`. If the cache keeps records of routing, it writes them."""

    fused = False

    def __init__(self, tree: Any, attention: Attention, slots: Slots) -> None:
        self._tree, self._attention, self._slots = tree, attention, slots
        records = attention.cache is not None and attention.cache.routing is not None
        self._tap = RoutingTap(tree) if records else None
        self._experts = [module for module in tree.modules() if isinstance(module, SlottedExperts)]
        adapted = [module for module in tree.modules() if isinstance(module, SlottedLinear | SlottedExperts)]
        self._mask: SlotMask | None = adapted[0].mask if adapted else None
        self.vocabulary = int(tree.get_output_embeddings().weight.shape[0])

    @property
    def layers(self) -> Iterator[object]:
        yield from self._tree.modules()
        for each in self._experts:
            yield from expert_layers(each.gate_up_proj, each.down_proj, each)

    @property
    def scale(self) -> float:
        return 1.0 if self._mask is None else self._mask.scale

    def stop_recording(self) -> None:
        """Takes its tap from the routers of the tree."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    def pad_experts(self, rows: int) -> None:
        """Pads the products of experts that have adapters; those of transformers run token by token, or grouped."""
        for each in self._experts:
            each.padding = rows

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        writes: Tensor,
        slots: Tensor,
        attend: Attend,
        keep: Tensor | None,
        attend_kept: Attend | None = None,
    ) -> Tensor:
        self._attention.step = AttentionStep(writes.to(torch.int64), attend)
        self._slots.choose(slots)
        output = run_modules(self._tree, tokens, positions, logits_to_keep=0 if keep is None else keep)
        if self._tap is not None and self._attention.cache is not None:
            self._attention.cache.record_routing(writes, self._tap.take())
        logits: Tensor = output.logits[0]
        return logits.float()
