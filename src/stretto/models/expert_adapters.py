"""Low-rank adapters on experts: `y = W_e x + scale * B_e (A_e x)` for each expert `e`, with `W` frozen.

The experts of a layer are two Parameters, `gate_up_proj` and `down_proj`, each with an axis of experts. So are the
factors of their adapters. Gate and up are one linear layer and share their `A`, as in PEFT's `target_parameters`, whose
form adapters are exported in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.expert_products import Factors, aligned_rank, weighted_experts
from stretto.models.float32_products import wide_type

PROJECTIONS = ("gate_up_proj", "down_proj")  # the names of experts' Parameters
ADAPTER = "_adapter"  # after the name of a Parameter: the module that adapts it
CLASSES = ("MixtralExperts", "OlmoeExperts", "Qwen2MoeExperts", "Qwen3MoeExperts")  # that can be adapted


class ExpertAdapter(nn.Module):
    """The adapters of one Parameter of experts. Values are float32 or wider, as in `LoraLinear`.

    `lora_A` is [experts, r, in] and `lora_B` [experts, out, r].
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        experts, out, width = weight.shape
        dtype = wide_type(weight.dtype)
        self.scale, self.base_dtype = scale, weight.dtype
        self.in_features, self.out_features = width, out
        bound = 1 / math.sqrt(width)  # of the Kaiming-uniform values of one expert's A, as those of a linear layer
        initial = torch.empty(experts, rank, width, dtype=dtype).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(initial.to(weight.device))
        self.lora_B = nn.Parameter(torch.zeros(experts, out, rank, dtype=dtype, device=weight.device))

    def factors(self, dtype: torch.dtype) -> Factors:
        """Returns the adapters as grouped products take them, rounded to the type of the base; differentiable."""
        more = aligned_rank(self.lora_A.shape[1], dtype) - self.lora_A.shape[1]
        a, b = self.lora_A.to(dtype), self.lora_B.to(dtype)
        if more:
            a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        return Factors(a.transpose(1, 2), b.transpose(1, 2), self.scale)


class LoraExperts(nn.Module):
    """The experts of a layer with adapters on some of their Parameters, which are those of the module it replaces."""

    def __init__(
        self, base: Any, projections: Sequence[str], rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.num_experts, self.act_fn = base.num_experts, base.act_fn
        self.gate_up_proj, self.down_proj = base.gate_up_proj, base.down_proj
        self.gate_up_proj_adapter: ExpertAdapter | None = None
        self.down_proj_adapter: ExpertAdapter | None = None
        for name in projections:
            setattr(self, name + ADAPTER, ExpertAdapter(getattr(base, name), rank, scale, generator))

    def factors(self) -> tuple[Factors | None, Factors | None]:
        """Returns the adapters of both Parameters."""
        dtype = self.gate_up_proj.dtype
        up, down = self.gate_up_proj_adapter, self.down_proj_adapter
        return None if up is None else up.factors(dtype), None if down is None else down.factors(dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum [T, width] of each token's experts."""
        made = weighted_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self.act_fn, *self.factors()
        )
        return made.to(hidden_states.dtype)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of experts that can be adapted, by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in CLASSES}


def parameter_name(adapter: str) -> str:
    """Returns the Parameter that the module of this name adapts; another name is returned as it is."""
    return adapter.removesuffix(ADAPTER)


def is_expert_adapter(name: str) -> bool:
    """True if the name is that of an adapter on experts, among those of adapted modules."""
    return name.endswith(tuple(projection + ADAPTER for projection in PROJECTIONS))


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of adapters by the names and in the shapes that PEFT's files have.

    PEFT wraps a module once for each of its adapted Parameters, in their order. So the adapters of the last one have
    the name of the module, and those of the one before the name of its `base_layer`.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not is_expert_adapter(module):
            found[name] = tensor
            continue
        owner, _, projection = parameter_name(module).rpartition(".")
        wrapped = projection == PROJECTIONS[0] and f"{owner}.{PROJECTIONS[1]}{ADAPTER}.{leaf}" in tensors
        # A is [experts * r, in]. The columns of B [out, r * experts] count the experts first.
        flat = tensor.flatten(0, 1) if leaf == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
        found[f"{owner}.base_layer.{leaf}" if wrapped else f"{owner}.{leaf}"] = flat
    return found


def from_peft(tensors: Mapping[str, Tensor], parameters: Sequence[str], rank: int) -> dict[str, Tensor]:
    """Undoes `to_peft`. `parameters` are the ends of the names of the adapted Parameters: `target_parameters`."""
    adapted = [name for name in PROJECTIONS if any(each.rpartition(".")[2] == name for each in parameters)]
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        owner = module.removesuffix(".base_layer")
        if not adapted or not owner.endswith(".experts"):
            found[name] = tensor
            continue
        projection = adapted[0] if module != owner else adapted[-1]
        if leaf == "lora_A":
            whole = tensor.reshape(-1, rank, tensor.shape[1])
        else:
            whole = tensor.reshape(tensor.shape[0], rank, -1).permute(2, 0, 1)
        found[f"{owner}.{projection}{ADAPTER}.{leaf}"] = whole
    return found
