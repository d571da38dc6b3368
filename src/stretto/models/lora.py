"""Low-rank adapters: `y = W x + b + scale * B (A x)`, with `W` frozen and shared with other holders.

Adapters are applied by a subclass of `nn.Linear` rather than by PEFT. PEFT's wrappers go through several Python calls,
dictionary look-ups and type checks at every linear layer, and the trainer's thread shares the interpreter lock with the
engine's. On the tiny model (14 adapted layers, 64 tokens, one CPU core) a forward pass takes 2.3 ms without adapters,
2.8 ms with these and 3.4 ms with PEFT's: half the overhead (`bench/training.py`). Adapters are exported in PEFT's
format. Those on experts are in `expert_adapters.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from stretto.errors import ModelError
from stretto.models.adapter_config import CONFIG_FILE
from stretto.models.expert_adapters import (
    ADAPTER,
    PROJECTIONS,
    ExpertAdapter,
    LoraExperts,
    experts_of,
    is_expert_adapter,
    parameter_name,
    to_peft,
)
from stretto.models.float32_products import wide_type
from stretto.models.lora_options import LoraOptions
from stretto.models.routing import is_mixture

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX, SUFFIX = "base_model.model.", ".weight"  # around the names of an adapter's tensors
BASE_FILE = "base_checksums.json"  # the checksums of the base by type
# Names that a target may have if it means experts, or their router.
EXPERT_NAMES = ("experts", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate", "mlp")


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. `weight` and `bias` are the Parameters of the layer that it replaces.

    `lora_A` and `lora_B` are float32 or wider, because an optimizer's small steps vanish in half precision; they are
    rounded to the type of the base at every use, which is also how they are published.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: it would make a second weight
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.scale, self.base_dtype = scale, base.weight.dtype
        dtype = wide_type(base.weight.dtype)
        # The values are drawn on the CPU, so that a seed gives the same adapter on every device.
        initial = torch.empty(rank, base.in_features, dtype=dtype)
        nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(initial.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=base.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        narrow = rows @ self.lora_A.to(rows.dtype).t()
        # In place on the base's output, which its backward pass does not need: one pass over it instead of three.
        wide = nn.functional.linear(rows, self.weight, self.bias)
        wide = wide.addmm_(narrow, self.lora_B.to(rows.dtype).t(), alpha=self.scale)
        return wide.view(*input.shape[:-1], self.out_features)


ADAPTED = (LoraLinear, ExpertAdapter)
"""The modules that hold adapters: `lora_A`, `lora_B`, `scale` and the type of their base."""


def inject_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
) -> tuple[str, ...]:
    """Puts adapters on what `targets` names, freezes the rest, and returns the names of the modules with adapters.

    Linear layers are replaced by `LoraLinear`, and the experts of a layer by `LoraExperts`, over the same Parameters.
    The adapters start with the values that PEFT gives them: `A` Kaiming-uniform, drawn from `seed`, and `B` zero.
    """
    if present := next((name for name, module in model.named_modules() if isinstance(module, ADAPTED)), None):
        raise ModelError(f"`{present}` has an adapter already: a model takes one set of them")
    linears, experts = adapted_modules(model, targets), adapted_experts(model, targets)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in linears.items():
        _replace(model, name, LoraLinear(module, rank, alpha / rank, generator))
    for name, projections in experts.items():
        base = model.get_submodule(name)
        _replace(model, name, LoraExperts(base, projections, rank, alpha / rank, generator))
    return (*linears, *adapter_names(experts))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def adapted_modules(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """Returns the linear layers that `targets` names, in the model's order: every one but the head if it is empty.

    A target matches a module of that name or one whose name ends in `.` plus it. The head is never among them: its
    logits are made in chunks from the plain weight. Raises `ModelError` for a target that matches nothing.
    """
    causal_lm: Any = model
    head = causal_lm.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    expert = [f"{name}.{projection}" for name in experts_of(model) for projection in PROJECTIONS]
    for target in targets:
        if not any(_matches(name, target) for name in (*linear, *expert)):
            if is_mixture(causal_lm.config) and target.rsplit(".", 1)[-1] in EXPERT_NAMES:
                fix = f"name {' or '.join(map(repr, PROJECTIONS))} for the weights of experts"
                if not expert:
                    fix = f"those of `{type(model).__name__}` cannot be adapted; name linear layers"
                raise ModelError(
                    f"`model.lora.targets` has {target!r}, which names experts of a mixture or their router: {fix}, or "
                    "leave `model.lora` out to train all weights"
                )
            ends = sorted({name.rsplit(".", 1)[-1] for name in (*linear, *expert)})
            raise ModelError(
                f"`model.lora.targets` has {target!r}, which names no layer that adapters can be on; name some of "
                f"{', '.join(ends)}, or leave it out for all linear layers but the output layer"
            )
    chosen = {n: m for n, m in linear.items() if not targets or any(_matches(n, target) for target in targets)}
    if not chosen and not targets:
        raise ModelError(
            f"`model.lora` finds nothing to adapt: `{type(model).__name__}` has no linear layer but its head; leave "
            "`model.lora` out to train all weights, or choose another model"
        )
    return chosen


def adapted_experts(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the Parameters of experts that `targets` names, by the name of their module, in the model's order.

    None if `targets` is empty: adapters on all experts are many times as large as those on the linear layers.
    """
    found = {
        name: tuple(each for each in PROJECTIONS if any(_matches(f"{name}.{each}", target) for target in targets))
        for name in experts_of(model)
    }
    return {name: projections for name, projections in found.items() if projections}


def adapter_names(experts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns the names of the modules that adapt these Parameters of experts."""
    return tuple(f"{name}.{each}{ADAPTER}" for name, projections in experts.items() for each in projections)


def lora_tensors(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns a copy of the adapters in the type of the base: `<module>.lora_A` [r, in], `<module>.lora_B` [out, r].

    Those on experts have an axis of experts before these two.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: list[torch.Tensor] = []
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, ADAPTED)
        for leaf, parameter in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
            values.append(parameter.detach())
            tensors[f"{name}.{leaf}"] = torch.empty_like(values[-1], dtype=module.base_dtype)
    torch._foreach_copy_(list(tensors.values()), values)
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    options: LoraOptions,
    base: str,
    names: Sequence[str],
    base_checksums: Mapping[str, str] | None = None,
) -> None:
    """Writes a PEFT adapter folder, which PEFT, transformers and vLLM load on top of `base`.

    `base_checksums` are those of the base by type, so that the adapter is refused on another one.
    """
    alpha = options.effective_alpha
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"{PREFIX}{name}{SUFFIX}": tensor.cpu().contiguous() for name, tensor in to_peft(tensors).items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if base_checksums:
        (folder / BASE_FILE).write_text(json.dumps(dict(base_checksums)) + "\n")
    linears = [name for name in names if not is_expert_adapter(name)]
    parameters = [parameter_name(name) for name in names if is_expert_adapter(name)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        # PEFT matches these as `inject_lora` does: by the end of a name.
        "target_modules": _targets_of(linears, options),
        "target_parameters": _targets_of(parameters, options) or None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _targets_of(names: Sequence[str], options: LoraOptions) -> list[str]:
    """Returns the options' targets that match one of `names`; if there are none in all, the ends of the names."""
    if options.targets:
        return [target for target in options.targets if any(_matches(name, target) for name in names)]
    return sorted({name.rsplit(".", 1)[-1] for name in names})
