"""The models that are plain pre-norm decoders: those that the engine's and the trainer's own forwards can compute.

A plain layer is a root-mean-square norm, attention over all earlier positions with a rotary embedding of whole heads,
another norm, and a gated feed-forward. Both forwards are compared with the model's own before they are used.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from stretto.models.routing import ROUTERS

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")  # plain but for their feed-forward, which has experts
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # their angles depend on the position alone


def is_plain(model: Any, *, mixtures: bool = False) -> bool:
    """True if the model has one of the known architectures and nothing in it is changed by hooks or other forwards.

    With `mixtures`, layers may have experts. The activation and the adapters are left to the caller: see `activations`
    and `same_adapters`.
    """
    known = (*ARCHITECTURES, *MIXTURES) if mixtures else ARCHITECTURES
    if type(model).__name__ not in known or not type(model).__module__.startswith("transformers.models."):
        return False
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return False
    config, decoder = model.config, model.model
    if getattr(config, "pretraining_tp", 1) != 1 or getattr(config, "sliding_window", None) is not None:
        return False
    if getattr(decoder.rotary_emb, "rope_type", None) not in STATIC_ROTARY:
        return False
    rotated = 2 * decoder.rotary_emb.inv_freq.numel()
    return all(_is_plain_layer(layer, rotated) for layer in decoder.layers)


def _is_plain_layer(layer: Any, rotated: int) -> bool:
    if {name for name, _ in layer.named_children()} != LAYER_PARTS or layer.self_attn.head_dim != rotated:
        return False
    if has_experts(layer):
        return len({linear.bias is None for linear in linear_groups(layer)[0]}) == 1
    if not all(hasattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    return all(len({linear.bias is None for linear in group}) == 1 for group in linear_groups(layer))


def has_experts(layer: Any) -> bool:
    """True if the feed-forward of a layer is a router with experts, and nothing besides."""
    parts = {name for name, _ in layer.mlp.named_children()}
    up = getattr(getattr(layer.mlp, "experts", None), "gate_up_proj", None)
    return parts == {"gate", "experts"} and type(layer.mlp.gate).__name__ in ROUTERS and getattr(up, "ndim", 0) == 3


def linear_groups(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """Returns the linear layers of a plain layer, those over one input together; without those of experts."""
    own, mlp = layer.self_attn, layer.mlp
    if has_experts(layer):
        return (own.q_proj, own.k_proj, own.v_proj), (own.o_proj,)
    return (own.q_proj, own.k_proj, own.v_proj), (own.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)


def activations(model: Any) -> set[str]:
    """Returns the class names of the activations of a plain model's layers."""
    blocks = [layer.mlp.experts if has_experts(layer) else layer.mlp for layer in model.model.layers]
    return {type(block.act_fn).__name__ for block in blocks}


def same_adapters(model: Any, kind: type[nn.Module]) -> bool:
    """True if the same linear layers are adapters of class `kind` in every layer of a plain model."""
    layers = model.model.layers
    adapted = {
        tuple(isinstance(linear, kind) for group in linear_groups(layer) for linear in group) for layer in layers
    }
    return len(adapted) == 1
