"""The set of kernels that an engine runs on, with the few facts by which a CPU and a GPU differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engines.native.batched_linears import JoinedProduct, Product, StackedProduct
from stretto.engines.native.kernels import cpu_layers, layers
from stretto.engines.native.kernels.decode_attention import paged_decode
from stretto.engines.native.kernels.decode_work_list import plan_items
from stretto.engines.native.kernels.experts import grouped_experts, looped_experts
from stretto.engines.native.kernels.prefill_attention import dense_causal, paged_extend
from stretto.engines.native.kernels.token_draw import draw


@dataclass(frozen=True, slots=True)
class PagedKernels:
    """Attention and draws on a device, with the signatures of the functions named alike."""

    draw: Callable[..., Any]
    plan_items: Callable[..., Any]
    paged_decode: Callable[..., Any]
    paged_extend: Callable[..., Any]
    dense_causal: Callable[..., Any] | None = None  # None: everything runs over pages


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of a decoder, with the signatures of the functions named alike, and the facts of the set."""

    product: Callable[..., Product]  # of the linear layers over one input, in the layout that the kernels read
    activation: Callable[[nn.Module], Any]  # as `gate` takes it; None: there is no kernel for it
    prepare: Callable[..., Any]  # once a forward: the rotary angles as `split_heads` takes them
    add_norm: Callable[..., Tensor]
    split_heads: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    expert_dtypes: frozenset[torch.dtype]  # that `experts` computes in
    paged: PagedKernels | None  # None: prompts are prefilled in the same forward as the decoding rows, a mixed batch
    overlap: bool  # the host takes the results of a step in while the next one runs; never in mixed batches
    signed_sines: bool  # of the rotary table that `prepare` takes
    float32_cache: bool  # so are keys and values
    float16: bool  # the fused decoder runs in float16

    @property
    def mixed_batches(self) -> bool:
        return self.paged is None


TRITON = Kernels(
    product=StackedProduct,
    activation=layers.activation_name,
    prepare=layers.prepare,
    add_norm=layers.add_norm,
    split_heads=layers.split_heads,
    gate=layers.gate,
    experts=grouped_experts,
    expert_dtypes=frozenset({torch.bfloat16}),  # of `grouped_mm` on CUDA
    paged=PagedKernels(draw, plan_items, paged_decode, paged_extend, dense_causal),
    overlap=True,
    signed_sines=False,
    float32_cache=False,
    float16=True,
)

CPU = Kernels(
    product=JoinedProduct,
    activation=cpu_layers.activation,
    prepare=cpu_layers.prepare,
    add_norm=cpu_layers.add_norm,
    split_heads=cpu_layers.split_heads,
    gate=cpu_layers.gate,
    experts=looped_experts,
    expert_dtypes=frozenset({torch.float32, torch.bfloat16}),
    paged=None,
    overlap=False,
    signed_sines=True,
    float32_cache=True,  # the sampled product over the cache wants float32; a wider cache loses nothing
    # A CPU adds a float16 product up by how its weight lies in memory. Weights that `JoinedProduct` had moved would
    # train to other bits than the same weights of a replay.
    float16=False,
)


def kernels_for(device: torch.device) -> Kernels:
    """Returns the set for a device."""
    return TRITON if device.type == "cuda" else CPU
