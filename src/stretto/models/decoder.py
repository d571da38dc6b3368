"""The trainer's decoder of plain models: a layer is one function of tensors, compiled once for all layers.

A layer of transformers is dozens of small kernels that are bound by memory (norms, rotary embedding, SwiGLU, residuals)
between the products. Compiled, the operations between two products are one kernel. The function takes the weights as
arguments, so all layers share one compiled graph. The numbers of tokens, sequences and copies are dynamic, so no batch
compiles again. Layer 0 of a model whose embedding is frozen gets a graph of its own, because its input needs no
gradient.

With half-precision weights the residual stream is float32 (`float32_products.py`), because bfloat16 loses most there.

Attention (`varlen_attention.py`) and adapted linear layers (`adapted_linear.py`) are operators that are opaque to the
compiler. `PackedModel` compares the result with the modules of transformers before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.models.adapted_linear import AdapterGroup, adapted_linear, adapted_wide
from stretto.models.decoder_support import activations, has_experts, is_plain, linear_groups, same_adapters
from stretto.models.expert_adapters import LoraExperts
from stretto.models.expert_kernels import routed_experts
from stretto.models.expert_products import weighted_experts
from stretto.models.float32_products import HALF, wide_linear, wide_type
from stretto.models.lora import LoraLinear
from stretto.models.packed_attention import PackedLayout
from stretto.models.routing import gates, normalizes, routers_of
from stretto.models.varlen_attention import causal_varlen
from stretto.models.varlen_layout import VarlenLayout

SILU = {"SiLU", "SiLUActivation"}
Count = Callable[[Tensor], None]
"""Is told the experts [T, k] of the tokens of a layer."""


class Projection(NamedTuple):
    """Linear layers over one input, as `project` takes them. The adapters' lists are empty if there are none."""

    weights: list[Tensor]
    biases: list[Tensor]
    downs: list[Tensor]
    ups: list[Tensor]
    down: Tensor | None
    ups_cast: list[Tensor]


class ExpertWeights(NamedTuple):
    """The router and the experts of a layer."""

    router: Tensor  # [experts, width]
    up: Tensor  # [experts, 2 * inner, width]: gate and up
    down: Tensor  # [experts, width, inner]
    adapters: LoraExperts | None  # of `up` and `down`


class LayerWeights(NamedTuple):
    """Every tensor of a layer."""

    before: Tensor  # norms
    between: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_in: Projection  # query, key, value
    attention_out: Projection
    mlp_in: Projection | None  # gate, up; None: the layer has experts
    mlp_out: Projection | None
    experts: ExpertWeights | None = None


@dataclass(frozen=True)
class LayerShape:
    """The constants of all layers."""

    head_size: int
    epsilon: float
    scaling: float
    owners: tuple[tuple[int, ...], ...]  # of the adapters in each of the four projections
    adapter_scale: float
    chosen: int = 0  # experts of a token
    normalizes: bool = True  # their weights add up to 1


def normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the root-mean-square norm in `wide_type`; the caller rounds it, once.

    The factor is computed in float32 whatever the type, as in transformers.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return wide.to(wide_type(x.dtype)) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to [T, heads, head size]; `cos` and `sin` are [T, 1, head size]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def project(x: Tensor, projection: Projection, owners: tuple[int, ...], scale: float) -> Sequence[Tensor]:
    """Returns the output of each linear layer [T, out]."""
    weights = projection.weights
    if projection.down is None:
        biases: Sequence[Tensor | None] = projection.biases or [None] * len(weights)
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    y, _ = adapted_linear(
        x, weights, projection.downs, projection.ups, projection.down, projection.ups_cast, list(owners), scale
    )
    parts = y.split_with_sizes([weight.shape[0] for weight in weights], 1)
    return [part + bias for part, bias in zip(parts, projection.biases, strict=True)] if projection.biases else parts


def add_projected(hidden: Tensor, x: Tensor, projection: Projection, owners: tuple[int, ...], scale: float) -> Tensor:
    """Returns the stream [T, width] plus the output of the one linear layer of `projection`."""
    if x.dtype not in HALF:
        (y,) = project(x, projection, owners, scale)
        return hidden + y
    (weight,) = projection.weights
    if projection.down is None:
        hidden = hidden + wide_linear(x, weight)
    else:
        base, added, _ = adapted_wide(
            x, weight, projection.downs[0], projection.ups[0], projection.down, projection.ups_cast[0], scale
        )
        hidden = hidden + base + added
    return hidden + projection.biases[0] if projection.biases else hidden


def expert_sum(
    shape: LayerShape, x: Tensor, weights: ExpertWeights, ids: Tensor | None, count: Count | None = None
) -> Tensor:
    """Returns the weighted sum [T, width] of each token's experts in `wide_type`: `ids` [T, k], or as routed.

    `count` is told the experts.
    """
    logits = wide_linear(x, weights.router)
    if ids is None:
        ids = logits.detach().topk(shape.chosen, dim=-1).indices
    if count is not None:
        count(ids)
    shares = gates(logits, ids, normalized=shape.normalizes)
    if weights.adapters is None and x.is_cuda and x.dtype == torch.bfloat16:  # of grouped products on CUDA
        return routed_experts(x, ids, shares, weights.up, weights.down)
    adapters = (None, None) if weights.adapters is None else weights.adapters.factors()
    return weighted_experts(x, ids, shares, weights.up, weights.down, F.silu, *adapters)


def attention_part(
    shape: LayerShape, hidden: Tensor, cos: Tensor, sin: Tensor, layout: VarlenLayout, weights: LayerWeights
) -> tuple[Tensor, Tensor]:
    """Returns `hidden` [T, width] after attention, in `wide_type`, and the input of the feed-forward or the experts.

    The input of a product or of attention is rounded to the type of the weights, once, as in the engine's kernels.
    """
    size, dtype = shape.head_size, weights.attention_in.weights[0].dtype
    x = normalized(hidden, weights.before, shape.epsilon).to(dtype)
    q, k, v = project(x, weights.attention_in, shape.owners[0], shape.adapter_scale)
    q, k, v = (part.view(len(part), -1, size) for part in (q, k, v))
    q, k = q.to(hidden.dtype), k.to(hidden.dtype)
    if weights.query_norm is not None and weights.key_norm is not None:
        q, k = normalized(q, weights.query_norm, shape.epsilon), normalized(k, weights.key_norm, shape.epsilon)
    q, k = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype)
    y, _ = causal_varlen(q, k, v, *layout, shape.scaling)
    hidden = add_projected(hidden, y.flatten(1), weights.attention_out, shape.owners[1], shape.adapter_scale)
    return hidden, normalized(hidden, weights.between, shape.epsilon).to(dtype)


def second_part(
    shape: LayerShape, hidden: Tensor, x: Tensor, weights: LayerWeights, ids: Tensor | None, count: Count | None
) -> Tensor:
    """Returns `hidden` [T, width] after the feed-forward or the experts, whose input is `x`.

    `ids` [T, k] are the experts that tokens go to, if the layer has experts; None: those that its router chooses.
    """
    if weights.experts is not None:
        return hidden + expert_sum(shape, x, weights.experts, ids, count)
    assert weights.mlp_in is not None
    assert weights.mlp_out is not None
    gate, up = project(x, weights.mlp_in, shape.owners[2], shape.adapter_scale)
    x = (F.silu(gate.to(hidden.dtype)) * up).to(x.dtype)
    return add_projected(hidden, x, weights.mlp_out, shape.owners[3], shape.adapter_scale)


class PlainDecoder:
    """The decoder of a plain model, over the Parameters of its module tree, in fewer operations.

    It is made after the adapters are in place. `compiled` runs the layers through `torch.compile` if gradients are
    enabled; of a mixture of experts only their attention, because the experts have kernels of their own.
    `checkpointing` stores one hidden state a layer and computes the rest again in the backward pass.
    """

    def __init__(self, model: Any, *, compiled: bool, checkpointing: bool, backend: str = "inductor") -> None:
        assert fits(model)
        self._decoder = model.model
        self._checkpointing = checkpointing
        first = self._decoder.layers[0].self_attn
        self._groups: list[AdapterGroup] = []
        self._layers = [self._weights_of(layer) for layer in self._decoder.layers]
        routers = routers_of(model)
        owners = tuple(self._owners_of(group) for group in linear_groups(self._decoder.layers[0]))
        self._shape = LayerShape(
            head_size=first.head_dim,
            epsilon=float(self._decoder.norm.variance_epsilon),
            scaling=float(first.scaling),
            owners=owners,
            adapter_scale=self._groups[0].scale if self._groups else 1.0,
            chosen=int(routers[0].top_k) if routers else 0,
            normalizes=normalizes(routers[0]) if routers else True,
        )
        copies = [group.copies for group in self._groups]
        self._cast = [each for into, _ in copies for each in into]
        self._values = [each for _, values in copies for each in values]
        self._compiled: Callable[..., Any] | None = None
        self._mixture = bool(routers)
        if compiled:
            own = own_code(PlainDecoder._attention if self._mixture else PlainDecoder._layer)
            self._compiled = torch.compile(MethodType(own, self), backend=backend, fullgraph=True)

    def _layer(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: VarlenLayout,
        weights: LayerWeights,
        ids: Tensor | None = None,
        count: Count | None = None,
    ) -> Tensor:
        hidden, x = self._attention(hidden, cos, sin, layout, weights)
        return second_part(self._shape, hidden, x, weights, ids, count)

    def _attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: VarlenLayout, weights: LayerWeights
    ) -> tuple[Tensor, Tensor]:
        return attention_part(self._shape, hidden, cos, sin, layout, weights)

    def _compiled_attention(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: VarlenLayout,
        weights: LayerWeights,
        ids: Tensor | None = None,
        count: Count | None = None,
    ) -> Tensor:
        """Does the same as `_layer`, with its attention compiled. Of the weights, that one sees its own alone."""
        assert self._compiled is not None
        own = weights._replace(mlp_in=None, mlp_out=None, experts=None)
        hidden, x = self._compiled(hidden, cos, sin, layout, own)
        return second_part(self._shape, hidden, x, weights, ids, count)

    @property
    def compiled(self) -> bool:
        """True if layers run compiled, which they do only with gradients enabled."""
        return self._compiled is not None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the last hidden state of every token [T, width]."""
        with torch.no_grad():
            if self._cast:
                torch._foreach_copy_(self._cast, self._values)
            # It reads only the type and the device of its first argument.
            cos, sin = self._decoder.rotary_emb(self._decoder.embed_tokens.weight, position_ids[None])
            cos, sin = cos[0, :, None], sin[0, :, None]
        hidden = F.embedding(input_ids, self._decoder.embed_tokens.weight)
        dtype = hidden.dtype
        hidden = hidden.to(wide_type(dtype))
        training = torch.is_grad_enabled()
        layer = self._layer
        if self._compiled is not None and training:
            layer = self._compiled_attention if self._mixture else self._compiled
        place = 0  # among the layers that have experts
        for weights in self._layers:
            if layer is not self._layer:
                for tensor in (hidden, cos, sin, layout.varlen.copies):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.maybe_mark_dynamic(layout.varlen.ends, 1)
            ids = count = None
            if weights.experts is not None:
                ids = None if layout.routing is None else layout.routing[:, place]
                count = layout.counts_of(place)
                place += 1
            arguments = (hidden, cos, sin, layout.varlen, weights, ids, count)
            if self._checkpointing and training:
                hidden = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(*arguments)
        return normalized(hidden, self._decoder.norm.weight, self._shape.epsilon).to(dtype)

    def _weights_of(self, layer: Any) -> LayerWeights:
        own = layer.self_attn
        query_norm, key_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        attention_in, attention_out, *feed_forward = (self._projection(linears) for linears in linear_groups(layer))
        mlp_in, mlp_out = feed_forward or (None, None)
        experts = None
        if has_experts(layer):
            own_experts = layer.mlp.experts
            adapters = own_experts if isinstance(own_experts, LoraExperts) else None
            experts = ExpertWeights(layer.mlp.gate.weight, own_experts.gate_up_proj, own_experts.down_proj, adapters)
        return LayerWeights(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            attention_in,
            attention_out,
            mlp_in,
            mlp_out,
            experts,
        )

    def _projection(self, linears: Sequence[nn.Linear]) -> Projection:
        weights: list[Tensor] = [linear.weight for linear in linears]
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        if not self._owners_of(linears):
            return Projection(weights, biases, [], [], None, [])
        group = AdapterGroup(linears)
        self._groups.append(group)
        return Projection(weights, biases, group.downs, group.ups, group.down, group.ups_cast)

    @staticmethod
    def _owners_of(linears: Sequence[nn.Linear]) -> tuple[int, ...]:
        return tuple(place for place, linear in enumerate(linears) if isinstance(linear, LoraLinear))


def own_code(function: Any) -> Callable[..., Any]:
    """Returns the function with a code object of its own: torch stores and limits graphs by code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def fits(model: Any) -> bool:
    """True if `PlainDecoder` can run the model: a plain one with SiLU, and the same adapters in every layer.

    The adapted layers are a constant of the graph that all layers share.
    """
    return is_plain(model, mixtures=True) and activations(model) <= SILU and same_adapters(model, LoraLinear)
