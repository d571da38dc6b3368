"""Checks of a model when an engine is made: whether it can be served, and how exactly.

An error at the start that names the reason is better than logits that are almost right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engines.native.batched_linears import JoinedProduct, adapter_trials
from stretto.engines.native.expert_slots import SlottedExperts
from stretto.engines.native.lora_slots import SlottedLinear
from stretto.engines.native.rows import MAX_PADDING
from stretto.engines.native.transformers_forward import Attention, use_paged_attention
from stretto.errors import ModelError
from stretto.models.float16_range import range_hint
from stretto.models.float32_products import HALF, wide_logits
from stretto.models.loading import moving_rotary

logger = logging.getLogger(__name__)

PADDINGS = (8, 16, 32, MAX_PADDING)
HALF_TOLERANCE = 0.1  # transformers' modules round the stream twice a layer: 36 layers gave 0.054, a fault about 1
EXPERT_BYTES = 1 << 30  # the most that the gathered expert weights of one forward may take


class FusedNorm(nn.Module):
    """A root-mean-square norm in five operations; replaces a module that was seen to compute the same."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self._inverse = weight, 1.0 / weight.numel()
        self.epsilon: Tensor
        self.register_buffer("epsilon", torch.full((1,), epsilon, device=weight.device), persistent=False)
        self._operands = (self.weight, self.epsilon)  # faster to look up than Parameters and buffers

    def forward(self, x: Tensor) -> Tensor:
        weight, epsilon = self._operands
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(epsilon, norm, norm, value=self._inverse).rsqrt_()
        return torch.mul(x, inverse).mul_(weight)


def refuse_by_config(model: nn.Module) -> None:
    """Raises `ModelError` if the configuration asks for attention that a paged cache cannot do exactly."""
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
            " change with the longest sequence of a batch, so a trajectory would depend on its neighbours"
        )


def discover(trees: Sequence[nn.Module]) -> tuple[Attention, int, int, int, int]:
    """Installs the paged attention in the trees; returns it with layers, heads, kv heads and head size."""
    config: Any = trees[0].config
    refuse = f"the native engine does not serve `{config.model_type}`"
    attention = Attention()
    for tree in trees:
        tree.eval()
        use_paged_attention(tree, attention)
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
    """Replaces root-mean-square norms by `FusedNorm` if both agree on random numbers to rounding."""
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
    """Lets experts, if there are any, compute token by token; returns False if that would take too much memory.

    Grouped by expert, the number of rows of a product depends on the experts that the neighbours chose. Experts with
    adapters are padded instead.
    """
    if any(isinstance(module, SlottedExperts) for module in tree.modules()):
        return True
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


def exact_padding(layers: Iterable[object], max_tokens: int) -> tuple[int, bool]:
    """Returns the fewest tokens that a forward must have for each row to come out the same beside any others.

    Products choose their kernel by the number of rows. Every distinct shape among the products and linear layers of
    `layers` is tried with the calling thread's number of threads. The second result is False if no padding makes the
    rows equal bit for bit.
    """
    pending: dict[tuple[Any, ...], Any] = {}
    for layer in layers:
        if isinstance(layer, JoinedProduct):
            pending[layer.shape] = layer
        elif isinstance(layer, nn.Linear | SlottedLinear):
            adapted = isinstance(layer, SlottedLinear)
            strides = layer.weight.stride()
            pending[(layer.in_features, layer.out_features, layer.bias is None, adapted, strides)] = layer
    padding = 0
    for padding in PADDINGS:
        pending = {shape: layer for shape, layer in pending.items() if not _rows_agree(layer, padding, max_tokens)}
        if not pending:
            return padding, True
    logger.warning(
        "rows of a linear layer depend on their neighbours in the last bit for the shapes %s with %d threads",
        sorted(map(str, pending)),
        torch.get_num_threads(),
    )
    return padding, False


def _trials(layer: Any, generator: torch.Generator) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields each product of a layer as it is called in a forward, as a function of [tokens, in]."""
    if isinstance(layer, JoinedProduct):
        yield from layer.trials(generator)
        return
    yield lambda x: F.linear(x, layer.weight, layer.bias)
    if layer.weight.dtype in HALF:
        yield lambda x: wide_logits(x, layer.weight, layer.bias)
    if isinstance(layer, SlottedLinear):
        yield from adapter_trials(layer.in_features, layer.lora_b, generator)


def _rows_agree(layer: Any, padding: int, max_tokens: int) -> bool:
    top = max(max_tokens, padding + 1)
    counts = sorted(
        {n for n in (padding, padding + 1, padding + 7, 2 * padding + 3, 57, 100, 129, 256, 512) if n <= top}
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(counts[-1], layer.in_features, generator=generator).to(layer.weight.device, layer.weight.dtype)
    with torch.inference_mode():
        for product in _trials(layer, generator):
            whole = product(x)
            for count in counts:
                if count >= padding and not torch.equal(product(x[:count].contiguous()), whole[:count]):
                    return False
            shifted = x[3 : 3 + padding].contiguous()
            if len(shifted) == padding and not torch.equal(product(shifted), whole[3 : 3 + padding]):
                return False
    return True


def refuse_other_logits(model: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    """Raises `ModelError` if logits differ from the model's own by more than rounding."""
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
