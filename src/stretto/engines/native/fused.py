"""The forward of plain pre-norm decoders on a device, in ten launches a layer.

What `lean` is on a processor, this is on a GPU: products go to the vendor's library, everything between two products is
one kernel. Weights that read the same input are one matrix [out, in], and the adapters' `A` of all slots are its last
rows, so that their product rides along; the second product of an adapter is done where its result is consumed, each
token with the `B` of its own slot alone. The residual stream is float32, and so are the output and down products, whose
last columns are `A`'s results: the norm that follows adds both to the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engines.native.attention import Attend
from stretto.engines.native.cache import KVCache
from stretto.engines.native.kernels.choice import Kernels
from stretto.engines.native.lean import epsilon_of, rotary_table
from stretto.engines.native.lora import SlotMask, SlottedLinear
from stretto.training.wide import wide_logits, wide_mm, wide_type

ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu"}


def columns_of(*linears: nn.Linear | SlottedLinear) -> int:
    """Columns that the adapters of one layer need: slots times rank, or none."""
    return max((linear.lora_a.shape[1] for linear in linears if isinstance(linear, SlottedLinear)), default=0)


def stacked(linears: Sequence[nn.Linear | SlottedLinear], columns: int) -> tuple[Tensor, Tensor | None]:
    """The weights [out, in] of layers over one input as one matrix [outs + columns, in], and their biases.

    The values move into one storage and each Parameter becomes a view of its rows: it stays the object that others
    hold, contiguous as it was, and the weights are in memory once. The last rows are the adapters' `A`, layer by layer,
    slot by slot, `columns` a layer; a layer without an adapter beside one that has it gets rows of zeros.
    """
    first = linears[0].weight
    outs = sum(linear.out_features for linear in linears)
    whole = first.new_zeros(outs + columns * len(linears), linears[0].in_features)
    at = 0
    for linear in linears:
        rows = whole[at : at + linear.out_features]
        rows.copy_(linear.weight.detach())
        linear.weight.data = rows
        at += linear.out_features
    for linear in linears:
        if isinstance(linear, SlottedLinear):
            linear.place(whole[at : at + columns].t(), linear.lora_b)
        at += columns
    if all(linear.bias is None for linear in linears):
        return whole, None
    bias = first.new_zeros(whole.shape[0])
    at = 0
    for linear in linears:
        part = bias[at : at + linear.out_features]
        part.copy_(linear.bias.detach())
        linear.bias.data = part
        at += linear.out_features
    return whole, bias


class Product:
    """Layers over one input as one product; its output has the adapters' columns behind the layers' own."""

    def __init__(self, *linears: nn.Linear | SlottedLinear, columns: int) -> None:
        whole, bias = stacked(linears, columns)
        self.weight, self.bias = whole.t(), bias
        self.mask: SlotMask | None = None
        adapted = [linear for linear in linears if isinstance(linear, SlottedLinear)]
        self.bs: tuple[Tensor | None, ...] | None = None
        if adapted:
            self.mask = adapted[0].mask
            self.bs = tuple(linear.lora_b if isinstance(linear, SlottedLinear) else None for linear in linears)

    @property
    def scale(self) -> float:
        return 1.0 if self.mask is None else self.mask.scale

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def wide(self, x: Tensor) -> Tensor:
        """The output as it goes into the residual stream: float32."""
        return wide_mm(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of a root-mean-square norm, None where there is none, and its constant."""

    weight: Any
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(None, 0.0) if module is None else cls(module.weight, epsilon_of(module))


class FusedLayer:
    """One decoder layer: a root-mean-square norm, attention, another norm, a gated feed-forward."""

    def __init__(self, layer: Any) -> None:
        own, mlp = layer.self_attn, layer.mlp
        heads, gates, ends = (
            (own.q_proj, own.k_proj, own.v_proj),
            (mlp.gate_proj, mlp.up_proj),
            (own.o_proj, mlp.down_proj),
        )
        self.qkv = Product(*heads, columns=columns_of(*heads))
        self.gate_up = Product(*gates, columns=columns_of(*gates))
        self.out, self.down = (Product(end, columns=columns_of(end)) for end in ends)
        self.before, self.between = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = Norm.of(getattr(own, "q_norm", None)), Norm.of(getattr(own, "k_norm", None))
        self.width = mlp.gate_proj.out_features
        self.activation = ACTIVATIONS[type(mlp.act_fn).__name__]
        self.scaling = float(own.scaling)


def has_kernels(tree: Any) -> bool:
    """Whether the kernels know the activation of every layer of a plain decoder."""
    return all(type(layer.mlp.act_fn).__name__ in ACTIVATIONS for layer in tree.model.layers)


class FusedDecoder:
    """The forward of one tree over tokens that know their place in the cache."""

    def __init__(self, tree: Any, cache: KVCache, heads: int, kernels: Kernels, max_context: int) -> None:
        self._kernels, self._cache = kernels, cache
        self._heads, self._kv_heads, self._size = heads, cache.kv_heads, cache.head_size
        self._embedding = tree.model.embed_tokens.weight
        self._head = tree.lm_head.weight
        self._head_bias = tree.lm_head.bias
        self.layers = [FusedLayer(layer) for layer in tree.model.layers]
        self._norm = Norm.of(tree.model.norm)
        self._rotary = rotary_table(tree, max_context + 1, signed=False)
        self._hidden = int(self._embedding.shape[1])
        adapted = [module for module in tree.modules() if isinstance(module, SlottedLinear)]
        self._rank = adapted[0].rank if adapted else 0
        self._mask: SlotMask | None = adapted[0].mask if adapted else None
        self.vocabulary = self._head.shape[0]

    @property
    def scale(self) -> float:
        """Of the adapters: what a captured step has built in."""
        return 1.0 if self._mask is None else self._mask.scale

    def __call__(
        self,
        tokens: Tensor,  # [tokens]
        positions: Tensor,  # [tokens]
        write_slots: Tensor,  # [tokens], where each token's keys and values go
        slots: Tensor,  # [tokens], whose adapter each token runs under
        attend: Attend,
        keep: Tensor | None,  # tokens whose logits are wanted; None: all
    ) -> Tensor:
        """Logits [kept tokens, vocabulary], float32."""
        kernels, hidden, count = self._kernels, self._hidden, tokens.shape[0]
        stream = F.embedding(tokens, self._embedding).to(wide_type(self._embedding.dtype))
        x = self._embedding.new_empty(count, hidden)
        q = x.new_empty(count, self._heads, self._size)
        attended = torch.empty_like(q)
        added: Tensor | None = None  # what `arriving` made, which is not in the stream yet
        arriving: Product | None = None
        for number, layer in enumerate(self.layers):
            self._norm_into(stream, added, layer.before, arriving, slots, x)
            keys, values = self._cache.of_layer[number]
            kernels.split_heads(
                layer.qkv(x),
                self._heads,
                self._kv_heads,
                self._size,
                layer.query_norm.weight,
                layer.key_norm.weight,
                layer.query_norm.epsilon,
                self._rotary,
                positions,
                slots,
                layer.qkv.bs,
                self._rank,
                layer.qkv.scale,
                write_slots,
                keys,
                values,
                q,
            )
            attend(number, q, attended, layer.scaling)
            added = layer.out.wide(attended.view(count, -1))
            self._norm_into(stream, added, layer.between, layer.out, slots, x)
            gated = x.new_empty(count, layer.width)
            up = layer.gate_up
            kernels.gate(up(x), layer.width, layer.activation, slots, up.bs, self._rank, up.scale, gated)
            added, arriving = layer.down.wide(gated), layer.down
        if keep is not None and added is not None:
            stream, added = stream.index_select(0, keep), added.index_select(0, keep)
            slots, x = slots.index_select(0, keep), x.new_empty(keep.shape[0], hidden)
        self._norm_into(stream, added, self._norm, arriving, slots, x)
        return self._logits(x)

    def _norm_into(
        self, stream: Tensor, added: Tensor | None, norm: Norm, product: Product | None, slots: Tensor, out: Tensor
    ) -> None:
        """Add what `product` made to the stream, and write the norm of the sum."""
        b = None if product is None or product.bs is None else product.bs[0]
        scale = 1.0 if product is None else product.scale
        self._kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, b, self._rank, scale, out)

    def _logits(self, x: Tensor) -> Tensor:
        return wide_logits(x, self._head, self._head_bias).float()
