"""The forward of plain pre-norm decoders in as few operations as it takes.

A decode step of a small model is bound by the number of its operations, not by their size. For the architectures of
`PLAIN` this module computes what their transformers modules compute with a third of the calls: query, key and value are
one product, so are gate and up, the residual is added inside the products, and the tables of the rotary embedding are
made once. The weights stay where they are shared: fused products read one storage that the layers' own Parameters are
views of. The engine compares the result with the model's own forward, and keeps the stock modules where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engines.native.attention import Attention, Plan, attend_paged
from stretto.engines.native.lora import SlotMask, SlottedLinear
from stretto.training.decoder import PLAIN

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # their angles depend on the position alone


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights [out, in] side by side as one matrix [in, outs] that a product over rows reads in order; or biases [out].

    Where they are not so already, their values move into a new storage and each weight becomes a view of it: a
    Parameter stays the object that others hold, and the weights are in memory once. (Read the other way, products of
    few rows take up to four times as long on a CPU.)
    """
    first, widths = weights[0], [weight.shape[0] for weight in weights]
    total, place = sum(widths), first.storage_offset()
    for weight, width in zip(weights, widths, strict=True):
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.storage_offset() != place or weight.stride() != (1, total)[: weight.dim()]:
            break
        place += width
    else:
        size, stride = (*first.shape[1:], total), (total, 1)[-first.dim() :]
        return first.detach().as_strided(size, stride)
    whole = torch.cat([weight.detach().t() for weight in weights], dim=-1).contiguous()
    for weight, view in zip(weights, whole.split_with_sizes(widths, -1), strict=True):
        weight.data = view.t()
    return whole


class Projection:
    """Linear layers over one input as one product, with the adapters of all slots where they have any."""

    def __init__(self, *linears: nn.Linear | SlottedLinear, head: bool = False) -> None:
        self.in_features = linears[0].in_features
        self.widths = [linear.out_features for linear in linears]
        # [in, out]; a head stays as it is, because an embedding may read the same Parameter row by row
        self.weight = linears[0].weight.detach().t() if head else joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = joined(biases) if biases else None
        self.mask: SlotMask | None = None
        self.a = self.b = self.weight.new_empty(0)
        adapted = [linear for linear in linears if isinstance(linear, SlottedLinear)]
        self._adapted = len(adapted)
        if adapted:
            self.mask = adapted[0].mask
            self._fuse_adapters(linears, adapted)
        self.shape = (self.in_features, tuple(self.widths), self.bias is None, len(adapted))

    def _fuse_adapters(self, linears: Sequence[nn.Module], adapted: Sequence[SlottedLinear]) -> None:
        """A of all layers side by side; B on the diagonal, so that each layer's output sees its own columns alone."""
        columns = adapted[0].lora_b.shape[0]
        self.a = self.weight.new_zeros(self.in_features, columns * len(adapted))
        self.b = self.weight.new_zeros(columns * len(adapted), sum(self.widths))
        at = out = 0
        for linear, width in zip(linears, self.widths, strict=True):
            if isinstance(linear, SlottedLinear):
                own = slice(at, at + columns)
                linear.place(self.a[:, own], self.b[own, out : out + width])
                at += columns
            out += width

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side, [tokens, out], from [tokens, in]."""
        y = torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if self.mask is None:
            return y
        h = torch.mm(x, self.a).masked_fill_(self.mask.foreign_of[self._adapted], 0.0)
        return y.addmm_(h, self.b, alpha=self.mask.scale)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [tokens, out] with the output added, in place."""
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)
        if self.mask is None:
            return residual
        h = torch.mm(x, self.a).masked_fill_(self.mask.foreign_of[self._adapted], 0.0)
        return residual.addmm_(h, self.b, alpha=self.mask.scale)


class Norm:
    """A root-mean-square norm over the last dimension, without its weight where `weight` is None."""

    def __init__(self, size: int, epsilon: float, weight: Tensor | None, like: Tensor) -> None:
        self.weight, self._size, self._epsilon = weight, (size,), epsilon
        self._inverse = 1.0 / size
        self._constant = torch.full((1,), epsilon, device=like.device)
        # On the CPU in float32, five small operations are faster than the call for it.
        self._small = like.device.type == "cpu" and like.dtype == torch.float32

    def scale(self, x: Tensor) -> Tensor:
        """The factor [..., 1] that brings each vector to a mean square of one."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._constant, norm, norm, value=self._inverse).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        if not self._small:
            return F.rms_norm(x, self._size, self.weight, self._epsilon)
        y = torch.mul(x, self.scale(x))
        return y if self.weight is None else y.mul_(self.weight)


class LeanLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, attention: Attention, heads: int, kv_heads: int, size: int) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self._attention, self._index, self._scaling = attention, int(own.layer_idx), float(own.scaling)
        self._heads, self._all, self._size = heads, heads + kv_heads, size
        self.qkv, self.out = Projection(own.q_proj, own.k_proj, own.v_proj), Projection(own.o_proj)
        self.gate_up, self.down = Projection(mlp.gate_proj, mlp.up_proj), Projection(mlp.down_proj)
        self._activation = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
        like = own.q_proj.weight
        self._before = norm_of(layer.input_layernorm, like)
        self._between = norm_of(layer.post_attention_layernorm, like)
        self._head_norm: Norm | None = None
        if hasattr(own, "q_norm"):
            self._head_norm = Norm(size, epsilon_of(own.q_norm), None, like)
            self._head_weights = (own.q_norm.weight, own.k_norm.weight)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`hidden` [tokens, width] after the layer, changed in place; `cos` and signed `sin` are [tokens, size]."""
        tokens, heads, size = hidden.shape[0], self._heads, self._size
        qk, v = self.qkv(self._before(hidden)).split_with_sizes((self._all * size, (self._all - heads) * size), 1)
        x = qk.view(tokens, self._all, size).transpose(0, 1)  # [heads and kv heads, tokens, size]
        x = (x if self._head_norm is None else self._head_norm(x)).contiguous()
        q, k = x.split_with_sizes((heads, self._all - heads))
        if self._head_norm is not None:
            q.mul_(self._head_weights[0])
            k.mul_(self._head_weights[1])
        turned = x.roll(size // 2, -1)
        x.mul_(cos).addcmul_(turned, sin)
        y = attend_paged(self._attention, self._index, q, k.transpose(0, 1), v.view(tokens, -1, size), self._scaling)
        self.out.add_to(hidden, y.reshape(tokens, heads * size))
        gate, up = self.gate_up(self._between(hidden)).chunk(2, 1)
        return self.down.add_to(hidden, self._activation(gate).mul_(up))


class LeanDecoder:
    """The forward of one tree. Everything that it reads are the tree's own Parameters and adapters."""

    def __init__(self, tree: Any, attention: Attention, heads: int, kv_heads: int, size: int, max_context: int) -> None:
        self._embedding = tree.model.embed_tokens.weight
        self.layers = [LeanLayer(layer, attention, heads, kv_heads, size) for layer in tree.model.layers]
        self._norm, self.head = norm_of(tree.model.norm, self._embedding), Projection(tree.lm_head, head=True)
        self._rotary = rotary_table(tree, max_context, signed=True)

    @property
    def projections(self) -> list[Projection]:
        return [p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self.head]

    def __call__(self, plan: Plan, keep: Tensor | None) -> Tensor:
        """Logits [kept tokens, vocabulary] of a plan, whose attention and slots have been set."""
        hidden = F.embedding(plan.tokens, self._embedding)
        cos, sin = self._rotary.index_select(0, plan.positions).chunk(2, 1)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        if keep is not None:
            hidden = hidden.index_select(0, keep)
        return self.head(self._norm(hidden))


def rotary_table(tree: Any, positions: int, *, signed: bool) -> Tensor:
    """Cosines and sines of the rotary embedding, [positions, 2 * size].

    `signed`: the sines of the first half carry the minus that turning the second half into the first needs.
    """
    weight = tree.model.embed_tokens.weight
    with torch.no_grad():
        cos, sin = tree.model.rotary_emb(weight, torch.arange(positions, device=weight.device)[None])
    if signed:
        sin[..., : sin.shape[-1] // 2].neg_()
    return torch.cat((cos[0], sin[0]), dim=-1)


def epsilon_of(module: Any) -> float:
    """The constant of a root-mean-square norm of transformers, or of one that stands in for it."""
    epsilon = getattr(module, "variance_epsilon", None)
    return float(module.epsilon if epsilon is None else epsilon)


def norm_of(module: Any, like: Tensor) -> Norm:
    return Norm(module.weight.numel(), epsilon_of(module), module.weight, like)


def is_plain(tree: nn.Module) -> bool:
    """Whether `tree` is one of the known architectures, nothing in it changed by hooks or by other forwards."""
    config: Any = tree.config
    if type(tree).__name__ not in PLAIN or not type(tree).__module__.startswith("transformers.models."):
        return False
    if getattr(config, "pretraining_tp", 1) != 1:
        return False
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in tree.modules()):
        return False
    model: Any = tree.model
    if getattr(model.rotary_emb, "rope_type", None) not in STATIC_ROTARY:
        return False
    return all(_is_plain_layer(layer, 2 * model.rotary_emb.inv_freq.numel()) for layer in model.layers)


def _is_plain_layer(layer: Any, rotated: int) -> bool:
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if {name for name, _ in layer.named_children()} != parts or layer.self_attn.head_dim != rotated:
        return False
    own, mlp = layer.self_attn, layer.mlp
    if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    fused = ((own.q_proj, own.k_proj, own.v_proj), (mlp.gate_proj, mlp.up_proj))
    return all(len({linear.bias is None for linear in linears}) == 1 for linears in fused)
