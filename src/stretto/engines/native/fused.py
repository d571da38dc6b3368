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
from torch import Tensor, nn

from stretto.engines.native.batched_linears import Product
from stretto.engines.native.cache import KVCache
from stretto.engines.native.decoder_protocol import Attend
from stretto.engines.native.expert_slots import SlottedExperts, as_linear, expert_layers
from stretto.engines.native.kernels.experts import choose_experts
from stretto.engines.native.kernels.kernel_set import Kernels
from stretto.engines.native.lora_slots import SlotMask, SlottedLinear
from stretto.models.decoder_support import has_experts, is_plain
from stretto.models.float32_products import wide_logits, wide_type
from stretto.models.routing import normalizes


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


class Experts:
    """The router and the experts of a layer; reads their Parameters."""

    def __init__(self, block: Any, kernels: Kernels) -> None:
        self._router, self._chosen = block.gate.weight.detach(), int(block.gate.top_k)
        self._normalized = normalizes(block.gate)
        self._up, self._down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        self._activation, self._kernels = kernels.activation(block.experts.act_fn), kernels
        self._slotted = block.experts if isinstance(block.experts, SlottedExperts) else None
        self.padding = 0  # fewest rows of a product on a CPU, found by `exact_padding`

    @property
    def layers(self) -> list[nn.Linear]:
        """The products of the router and of one expert, as linear layers for `exact_padding`."""
        return [as_linear(self._router), *expert_layers(self._up, self._down, self._slotted)]

    def __call__(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output [T, width] in float32, for `add_norm` to add, and the ids [T, k] of the experts.

        `slots` [T] are those of the tokens' versions.
        """
        weights, ids = choose_experts(x, self._router, self._chosen, normalized=self._normalized)
        kernels = self._kernels
        made = kernels.experts(
            x, ids, weights, self._up, self._down, kernels.gate, self._activation, self.padding,
            None if self._slotted is None else self._slotted.adapters(slots),
        )  # fmt: skip
        return made, ids


class FusedLayer:
    """One decoder layer: a root-mean-square norm, attention, another norm, a gated feed-forward or experts."""

    def __init__(self, layer: Any, kernels: Kernels) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.qkv: Product = kernels.product(own.q_proj, own.k_proj, own.v_proj)
        self.out: Product = kernels.product(own.o_proj)
        self.experts = Experts(mlp, kernels) if has_experts(layer) else None
        if self.experts is None:
            self.gate_up: Product = kernels.product(mlp.gate_proj, mlp.up_proj)
            self.down: Product = kernels.product(mlp.down_proj)
            self.width = mlp.gate_proj.out_features
            self.activation = kernels.activation(mlp.act_fn)
        self.before, self.between = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = Norm.of(getattr(own, "q_norm", None)), Norm.of(getattr(own, "k_norm", None))
        self.scaling = float(own.scaling)

    @property
    def products(self) -> list[object]:
        """Every product of the layer."""
        rest = (self.gate_up, self.down) if self.experts is None else self.experts.layers
        return [self.qkv, self.out, *rest]


def fits(tree: Any, kernels: Kernels) -> bool:
    """True if the fused decoder can run `tree`: a plain decoder of one type, whose activation the kernels have."""
    dtypes = {parameter.dtype for parameter in tree.parameters()}
    if not is_plain(tree, mixtures=True) or len(dtypes) > 1 or (torch.float16 in dtypes and not kernels.float16):
        return False
    mixed = [layer for layer in tree.model.layers if has_experts(layer)]
    if mixed and not dtypes <= kernels.expert_dtypes:
        return False
    blocks = [layer.mlp.experts if layer in mixed else layer.mlp for layer in tree.model.layers]
    return all(kernels.activation(block.act_fn) is not None for block in blocks)


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
        adapted = [module for module in tree.modules() if isinstance(module, SlottedLinear | SlottedExperts)]
        self._rank = adapted[0].rank if adapted else 0
        self._mask: SlotMask | None = adapted[0].mask if adapted else None
        self.vocabulary = int(tree.lm_head.weight.shape[0])

    @property
    def scale(self) -> float:
        return 1.0 if self._mask is None else self._mask.scale

    @property
    def layers(self) -> list[object]:
        return [product for layer in self._layers for product in layer.products] + [self._lm_head]

    def pad_experts(self, rows: int) -> None:
        """Lets the products of experts have at least so many rows, if the kernels can pad them."""
        for layer in self._layers:
            if layer.experts is not None:
                layer.experts.padding = rows

    def stop_recording(self) -> None:
        """Does nothing: a forward records if the cache has records."""

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
        stream = stream.to(wide_type(stream.dtype))
        attended = self._embedding.new_empty(count, heads, size)
        angles = kernels.prepare(self._rotary, positions, slots, self._mask)
        x: Tensor | None = None  # x and q are memory that the kernels may write to again
        q: Tensor | None = None
        added: Tensor | None = None  # an output that is not in the stream yet, with the adapter's factor and scale
        b, scale = None, 1.0
        kept, routed = None, list[Tensor]()  # the experts of the tokens, by layer
        for number, layer in enumerate(self._layers):
            norm, qkv, out = layer.before, layer.qkv, layer.out
            x = kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, b, rank, scale, x)
            keys, values = self._cache.of_layer[number]
            norm = layer.query_norm
            q = kernels.split_heads(
                qkv(x), heads, kv_heads, size, norm.weight, layer.key_norm.weight, norm.epsilon, angles, positions,
                slots, qkv.bs, rank, qkv.scale, writes, keys, values, q,
            )  # fmt: skip
            if number == cut and keep is not None and attend_kept is not None:
                if not keep.shape[0]:
                    self._record(writes, routed, None, None)
                    return self._logits(x[:0])
                kept = keep
                stream, slots, q = (each.index_select(0, keep) for each in (stream, slots, q))
                attend, attended, keep, x = attend_kept, torch.empty_like(q), None, None
            attended = attend(number, q, attended, layer.scaling)
            added, norm = out.add_to(stream, attended.reshape(q.shape[0], -1)), layer.between
            x = kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, out.bs[0], rank, out.scale, x)
            if layer.experts is not None:
                (added, ids), b, scale = layer.experts(x, slots), None, 1.0
                routed.append(ids)
                continue
            up, down = layer.gate_up, layer.down
            gated = kernels.gate(up(x), layer.width, layer.activation, slots, up.bs, rank, up.scale)
            added, b, scale = down.add_to(stream, gated), down.bs[0], down.scale
        self._record(writes, routed, kept, routed.pop() if kept is not None and self._layers[-1].experts else None)
        if keep is not None:
            stream, x = stream.index_select(0, keep), None
            if added is not None:
                added, slots = added.index_select(0, keep), slots.index_select(0, keep)
        norm = self._norm
        return self._logits(kernels.add_norm(stream, added, norm.weight, norm.epsilon, slots, b, rank, scale, x))

    def _record(self, writes: Tensor, routed: list[Tensor], kept: Tensor | None, last: Tensor | None) -> None:
        """Records the experts of the tokens. `last` are those of the `kept` tokens in the last layer, if it was cut.

        Nothing reads the last layer of the other tokens. They get the first experts there, whatever was in the memory.
        """
        routing = self._cache.routing
        if routing is None:
            return
        if len(routed) < routing.shape[1]:
            chosen = routing.shape[2]
            first = torch.arange(chosen, device=writes.device).expand(writes.shape[0], chosen).clone()
            routed = [*routed, first if last is None or kept is None else first.index_copy_(0, kept, last)]
        self._cache.record_routing(writes, torch.stack(routed, 1))

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias = self._head
        return wide_logits(x, weight, bias).float()


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
