"""The forward of plain pre-norm decoders, over the kernels of a CPU or of a GPU.

Products go to the vendor's library; everything between two products is one kernel on a GPU, ten launches a layer, and a
few small operations on a CPU. The engine compares the result with the model's own forward, and runs the modules of
transformers where it differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engines.native.batched_linears import Product
from stretto.engines.native.cache import KVCache
from stretto.engines.native.decoder_protocol import Attend
from stretto.engines.native.kernels.kernel_set import Kernels
from stretto.engines.native.lora_slots import SlotMask, SlottedLinear
from stretto.models.decoder_support import is_plain
from stretto.models.float32_products import wide_logits, wide_type


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of a root-mean-square norm, None if there is none, and its constant."""

    weight: Any
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        if module is None:
            return cls(None, 0.0)
        return cls(module.weight, float(module.variance_epsilon))


class FusedLayer:
    """One decoder layer: a root-mean-square norm, attention, another norm, a gated feed-forward."""

    def __init__(self, layer: Any, kernels: Kernels) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.qkv: Product = kernels.product(own.q_proj, own.k_proj, own.v_proj)
        self.out: Product = kernels.product(own.o_proj)
        self.gate_up: Product = kernels.product(mlp.gate_proj, mlp.up_proj)
        self.down: Product = kernels.product(mlp.down_proj)
        self.before, self.between = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = Norm.of(getattr(own, "q_norm", None)), Norm.of(getattr(own, "k_norm", None))
        self.width = mlp.gate_proj.out_features
        self.activation = kernels.activation(mlp.act_fn)
        self.scaling = float(own.scaling)


def fits(tree: Any, kernels: Kernels) -> bool:
    """True if the fused decoder can run `tree`: a plain decoder of one type, whose activation the kernels have."""
    dtypes = {parameter.dtype for parameter in tree.parameters()}
    if not is_plain(tree) or len(dtypes) > 1 or (torch.float16 in dtypes and not kernels.float16):
        return False
    return all(kernels.activation(layer.mlp.act_fn) is not None for layer in tree.model.layers)


class FusedDecoder:
    """The forward of one plain tree. It reads the tree's own Parameters and adapters."""

    fused = True

    def __init__(self, tree: Any, cache: KVCache, heads: int, kernels: Kernels, max_context: int) -> None:
        self._kernels, self._cache = kernels, cache
        self._heads, self._kv_heads, self._size = heads, cache.kv_heads, cache.head_size
        self._embedding = tree.model.embed_tokens.weight
        self._lm_head, self._head = tree.lm_head, (tree.lm_head.weight.detach(), tree.lm_head.bias)
        self._layers = [FusedLayer(layer, kernels) for layer in tree.model.layers]
        self._norm = Norm.of(tree.model.norm)
        self._rotary = _rotary_table(tree, max_context + 1, signed=kernels.signed_sines)
        adapted = [module for module in tree.modules() if isinstance(module, SlottedLinear)]
        self._rank = adapted[0].rank if adapted else 0
        self._mask: SlotMask | None = adapted[0].mask if adapted else None
        self.vocabulary = int(tree.lm_head.weight.shape[0])

    @property
    def scale(self) -> float:
        return 1.0 if self._mask is None else self._mask.scale

    @property
    def layers(self) -> list[object]:
        return [p for layer in self._layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [
            self._lm_head
        ]

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
        kernels, rank, count = self._kernels, self._rank, tokens.shape[0]
        heads, kv_heads, size = self._heads, self._kv_heads, self._size
        cut = len(self._layers) - 1 if keep is not None and attend_kept is not None else -1
        stream = F.embedding(tokens, self._embedding)
        if kernels.float32_stream:
            stream = stream.to(wide_type(stream.dtype))
        attended = self._embedding.new_empty(count, heads, size)
        angles = kernels.prepare(self._rotary, positions, slots, self._mask)
        x: Tensor | None = None  # x and q are memory that the kernels may write to again
        q: Tensor | None = None
        added: Tensor | None = None  # an output that is not in the stream yet, with the adapter's factor and scale
        b, scale = None, 1.0
        for number, layer in enumerate(self._layers):
            norm, qkv, out, up, down = layer.before, layer.qkv, layer.out, layer.gate_up, layer.down
            x = kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, b, rank, scale, x)
            keys, values = self._cache.of_layer[number]
            norm = layer.query_norm
            q = kernels.split_heads(
                qkv(x), heads, kv_heads, size, norm.weight, layer.key_norm.weight, norm.epsilon, angles, positions,
                slots, qkv.bs, rank, qkv.scale, writes, keys, values, q,
            )  # fmt: skip
            if number == cut and keep is not None and attend_kept is not None:
                if not keep.shape[0]:
                    return self._logits(x[:0])
                stream, slots, q = (each.index_select(0, keep) for each in (stream, slots, q))
                attend, attended, keep, x = attend_kept, torch.empty_like(q), None, None
            attended = attend(number, q, attended, layer.scaling)
            added, norm = out.add_to(stream, attended.reshape(q.shape[0], -1)), layer.between
            x = kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, out.bs[0], rank, out.scale, x)
            gated = kernels.gate(up(x), layer.width, layer.activation, slots, up.bs, rank, up.scale)
            added, b, scale = down.add_to(stream, gated), down.bs[0], down.scale
        if keep is not None:
            stream, x = stream.index_select(0, keep), None
            if added is not None:
                added, slots = added.index_select(0, keep), slots.index_select(0, keep)
        norm = self._norm
        return self._logits(kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, b, rank, scale, x))

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias = self._head
        if self._kernels.float32_stream:
            return wide_logits(x, weight, bias).float()
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _rotary_table(tree: Any, positions: int, *, signed: bool) -> Tensor:
    """Returns cosines and sines of the rotary embedding, [positions, 2 * size].

    `signed`: the sines of the first half carry the minus that turning the second half into the first needs.
    """
    weight = tree.model.embed_tokens.weight
    with torch.no_grad():
        cos, sin = tree.model.rotary_emb(weight, torch.arange(positions, device=weight.device)[None])
    if signed:
        sin[..., : sin.shape[-1] // 2].neg_()
    return torch.cat((cos[0], sin[0]), dim=-1)
