"""The parameters of a model, counted on the meta device: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from stretto.engines.native import fused
from stretto.engines.native.kernels.kernel_set import TRITON
from stretto.models import decoder
from stretto.models.expert_adapters import ExpertAdapter
from stretto.models.lora import inject_lora
from stretto.models.lora_options import LoraOptions


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """The numbers of a policy with its adapters that a memory plan needs."""

    lora: LoraOptions | None  # the adapters that it was counted with
    total: int  # parameters without those of adapters
    in_layers: int  # of `total`, in the layers of the decoder
    in_matrices: int  # of `total`, in all linear layers but the output layer
    trained: int  # parameters: all, or those of the adapters
    on_experts: int  # of `trained`, in adapters on experts
    widest: int  # outputs of the widest linear layer
    widest_inner: int  # the same without the output layer
    is_lean: bool  # the lean decoder can train it, if flash attention fits
    is_fused: bool  # the fused decoder of the native engine can run it on CUDA


def meta_model(config: Any) -> Any:
    """Builds a model of this configuration on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def num_parameters(model: nn.Module) -> int:
    """Returns the number of parameters. One that is used twice counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_parameters(config: Any, lora: LoraOptions | None) -> ParameterCounts:
    """Counts a model of this configuration with adapters, or without if `lora` is None."""
    model = meta_model(config)
    total, is_lean, is_fused = num_parameters(model), decoder.fits(model), fused.fits(model, TRITON)
    in_layers = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    head, linears = model.get_output_embeddings(), [each for each in model.modules() if isinstance(each, nn.Linear)]
    inner = [linear for linear in linears if linear is not head]
    if lora is not None:
        with torch.device("meta"):  # also for the values that adapters start with
            inject_lora(model, lora.rank, lora.effective_alpha, lora.targets)
    on_experts = [num_parameters(module) for module in model.modules() if isinstance(module, ExpertAdapter)]
    return ParameterCounts(
        lora=lora,
        total=total,
        in_layers=in_layers,
        in_matrices=sum(linear.weight.numel() for linear in inner),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        on_experts=sum(on_experts),
        widest=max((linear.out_features for linear in linears), default=0),
        widest_inner=max((linear.out_features for linear in inner), default=0),
        is_lean=is_lean,
        is_fused=is_fused,
    )
