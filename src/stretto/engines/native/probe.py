"""What is found out about a model when an engine is made: whether it can be served, and how exactly.

Refusing by name at the start is better than logits that are almost right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engines.native.attention import Attention, attend
from stretto.engines.native.lean import Projection
from stretto.engines.native.lora import SlottedLinear
from stretto.errors import ModelError
from stretto.models import moving_rotary
from stretto.narrowing import range_hint

logger = logging.getLogger(__name__)

FILLINGS = (8, 16, 32, 64)
HALF_TOLERANCE = 0.1  # stock modules round their stream twice a layer: 0.054 was seen of 36 layers, a fault is near 1
EXPERT_BYTES = 1 << 30  # gathered expert weights of one forward, at most


class FusedNorm(nn.Module):
    """A root-mean-square norm in five operations; stands in for a module that was seen to compute the same."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self._inverse = weight, 1.0 / weight.numel()
        self.epsilon: Tensor
        self.register_buffer("epsilon", torch.full((1,), epsilon, device=weight.device), persistent=False)
        self._operands = (self.weight, self.epsilon)  # found faster than registered ones

    def forward(self, x: Tensor) -> Tensor:
        weight, epsilon = self._operands
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(epsilon, norm, norm, value=self._inverse).rsqrt_()
        return torch.mul(x, inverse).mul_(weight)


def refuse_by_config(model: nn.Module) -> None:
    """Refuse what the configuration says the paged attention cannot do."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    other = {kind for kind in getattr(text, "layer_types", None) or () if kind != "full_attention"}
    if other:
        raise ModelError(
            f"the native engine does not serve `{config.model_type}`: it has layers of type {sorted(other)},"
            " only `full_attention` is kept exactly"
        )
    if moving := moving_rotary(config):
        raise ModelError(
            f"the native engine does not serve `{config.model_type}` with `rope_type = {moving!r}`: its angles"
            " change with the longest sequence of a batch, so that a trajectory would depend on its neighbours"
        )


def discover(trees: Sequence[nn.Module]) -> tuple[Attention, int, int, int, int]:
    """Put the paged attention into the trees; returns it with layers, heads, kv heads and head size."""
    config: Any = trees[0].config
    refuse = f"the native engine does not serve `{config.model_type}`"
    attention = Attention()
    for tree in trees:
        tree.eval()
        attend(tree, attention)
    device = next(trees[0].parameters()).device
    with torch.inference_mode():
        trees[0](input_ids=torch.zeros(1, 4, dtype=torch.int64, device=device), use_cache=False)
    layers = config.get_text_config().num_hidden_layers
    if sorted(attention.seen) != list(range(layers)):
        raise ModelError(
            f"{refuse}: {len(attention.seen)} of its {layers} layers attend through transformers' attention interface"
        )
    shapes = set(attention.seen.values())
    if len(shapes) > 1:
        raise ModelError(f"{refuse}: its layers differ in heads or head size, {sorted(shapes)}")
    return attention, layers, *shapes.pop()


def fuse_norms(tree: nn.Module) -> None:
    """Replace root-mean-square norms by the fused call where both give the same on random numbers, to rounding."""
    for name, module in list(tree.named_modules()):
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or epsilon is None:
            continue
        if weight.dtype != torch.float32 or len(list(module.parameters())) != 1:
            continue
        fused = FusedNorm(weight, float(epsilon))
        x = torch.randn(3, *weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.device) * 2
        with torch.inference_mode():
            same = torch.allclose(fused(x), module(x), rtol=1e-5, atol=1e-6)
        if same:
            parent, _, last = name.rpartition(".")
            setattr(tree.get_submodule(parent), last, fused)


def batch_experts(tree: nn.Module, max_tokens: int) -> bool:
    """Compute experts token by token, where there are any; False where that would take too much memory.

    Grouped by expert, the number of rows of a product depends on what the neighbours chose.
    """
    config: Any = tree.config
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None)
    experts = [m for m in tree.modules() if getattr(m, "gate_up_proj", None) is not None and hasattr(m, "num_experts")]
    experts = [m for m in experts if isinstance(m.gate_up_proj, Tensor) and m.gate_up_proj.dim() == 3]
    if not experts:
        return not chosen
    first: Any = experts[0]
    bytes_each = (first.gate_up_proj[0].numel() + first.down_proj[0].numel()) * first.gate_up_proj.element_size()
    if max_tokens * int(chosen or 1) * bytes_each > EXPERT_BYTES:
        return False
    for module in tree.modules():
        inner = getattr(module, "config", None)
        if inner is not None and hasattr(inner, "_experts_implementation"):
            inner._experts_implementation = "batched_mm"
    return True


def exact_filling(layers: Iterable[object], max_tokens: int) -> tuple[int, bool]:
    """The fewest tokens a forward must have for each row to come out the same beside any others, bit for bit.

    Products choose their kernel by the number of rows; every distinct shape among the linear layers and projections of
    `layers` is tried with the calling thread's number of threads. Returns the filling, and whether it makes the engine
    exact.
    """
    pending: dict[tuple[Any, ...], Any] = {}
    for layer in layers:
        if isinstance(layer, Projection):
            pending[layer.shape] = layer
        elif isinstance(layer, nn.Linear | SlottedLinear):
            lora = isinstance(layer, SlottedLinear)
            pending[(layer.in_features, layer.out_features, layer.bias is None, lora)] = layer
    filling = 0
    for filling in FILLINGS:
        pending = {shape: layer for shape, layer in pending.items() if not _rows_agree(layer, filling, max_tokens)}
        if not pending:
            return filling, True
    logger.warning(
        "rows of a linear layer depend on their neighbours in the last bit for the shapes %s with %d threads",
        sorted(map(str, pending)),
        torch.get_num_threads(),
    )
    return filling, False


def _products(layer: Any, generator: torch.Generator) -> Iterator[Callable[[Tensor], Tensor]]:
    """What a layer computes from [1, tokens, in], each product as it is called in a forward."""
    weight, bias = layer.weight, layer.bias
    b = None
    if isinstance(layer, Projection):
        yield lambda x: (torch.mm(x[0], weight) if bias is None else torch.addmm(bias, x[0], weight))[None]
        yield lambda x: x.new_ones(x.shape[1], weight.shape[1]).addmm_(x[0], weight)[None]
        b = None if layer.mask is None else layer.b
    elif isinstance(layer, SlottedLinear):
        yield lambda x: F.linear(x[0], weight, bias)[None]
        b = layer.lora_b
    else:
        yield lambda x: F.linear(x, weight, bias)
    if b is None:
        return
    columns, width = b.shape
    a = torch.randn(layer.in_features, columns, generator=generator).to(weight)
    b = torch.randn(columns, width, generator=generator).to(weight)
    yield lambda x: torch.mm(x[0], a)[None]
    yield lambda x: x.new_ones(x.shape[1], width).addmm_(torch.mm(x[0], a), b, alpha=2.0)[None]


def _rows_agree(layer: Any, filling: int, max_tokens: int) -> bool:
    top = max(max_tokens, filling + 1)
    counts = sorted(
        {n for n in (filling, filling + 1, filling + 7, 2 * filling + 3, 57, 100, 129, 256, 512) if n <= top}
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, counts[-1], layer.in_features, generator=generator).to(layer.weight.device, layer.weight.dtype)
    with torch.inference_mode():
        for product in _products(layer, generator):
            whole = product(x)
            for count in counts:
                if count >= filling and not torch.equal(product(x[:, :count].contiguous()), whole[:, :count]):
                    return False
            shifted = x[:, 3 : 3 + filling].contiguous()
            if shifted.shape[1] == filling and not torch.equal(product(shifted), whole[:, 3 : 3 + filling]):
                return False
    return True


def refuse_other_logits(model: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    """Raise `ModelError` where logits are not the model's own to rounding."""
    dtype = next(model.parameters()).dtype
    tolerance = 1e-3 if dtype == torch.float32 else HALF_TOLERANCE
    same = ours.shape == theirs.shape
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)) if same else math.inf
    if not error <= tolerance:
        config: Any = model.config
        raise ModelError(
            f"the native engine does not serve `{config.model_type}`: its logits over a paged cache differ"
            f" from the model's own by {error:.2g} of their size{range_hint(dtype)}"
        )
