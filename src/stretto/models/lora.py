"""Low-rank adapters: `y = W x + b + scale * B (A x)`, with `W` frozen and shared with other holders.

Adapters are applied by a subclass of `nn.Linear` rather than by PEFT. PEFT's wrappers go through several Python calls,
dictionary look-ups and type checks at every linear layer, and the trainer's thread shares the interpreter lock with the
engine's. On the tiny model (14 adapted layers, 64 tokens, one CPU core) a forward pass takes 2.3 ms without adapters,
2.8 ms with these and 3.4 ms with PEFT's: half the overhead (`bench/training.py`). Adapters are exported in PEFT's
format.
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
from stretto.models.float32_products import wide_type
from stretto.models.lora_options import LoraOptions
from stretto.models.routing import is_mixture

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX, SUFFIX = "base_model.model.", ".weight"  # around the names of an adapter's tensors
BASE_FILE = "base_checksums.json"  # the checksums of the base by type
# Names that a target may have if it means experts.
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
        self.scale = scale
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


def inject_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
) -> tuple[str, ...]:
    """Replaces `adapted_modules` by `LoraLinear` over the same Parameters, freezes the rest, and returns their names.

    The adapters start with the values that PEFT gives them: `A` Kaiming-uniform, drawn from `seed`, and `B` zero.
    """
    chosen = adapted_modules(model, targets)
    present = [name for name, module in chosen.items() if isinstance(module, LoraLinear)]
    if present:
        raise ModelError(f"`{present[0]}` has an adapter already: a model takes one set of them")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in chosen.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(module, rank, alpha / rank, generator))
    return tuple(chosen)


def adapted_modules(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """Returns the linear layers that `targets` names, in the model's order: every one but the head if it is empty.

    A target matches a module of that name or one whose name ends in `.` plus it. The head is never among them: its
    logits are made in chunks from the plain weight. Raises `ModelError` for a target that matches nothing.
    """
    causal_lm: Any = model
    head = causal_lm.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}

    def matches(name: str, target: str) -> bool:
        return name == target or name.endswith("." + target)

    for target in targets:
        if not any(matches(name, target) for name in linear):
            if is_mixture(causal_lm.config) and target.rsplit(".", 1)[-1] in EXPERT_NAMES:
                raise ModelError(
                    f"`lora.targets` has {target!r}, which names experts of a mixture: adapters on experts are not "
                    "available; name linear layers of attention, or leave `model.lora` out to train all weights"
                )
            ends = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ModelError(f"`lora.targets` has {target!r}, which names no linear layer: there are {', '.join(ends)}")
    chosen = {n: m for n, m in linear.items() if not targets or any(matches(n, target) for target in targets)}
    if not chosen:
        raise ModelError(f"`{type(model).__name__}` has no linear layer but its head, so there is nothing to adapt")
    return chosen


def lora_tensors(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns a copy of the adapters in the type of the base: `<module>.lora_A` [r, in], `<module>.lora_B` [out, r]."""
    tensors: dict[str, torch.Tensor] = {}
    values: list[torch.Tensor] = []
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, LoraLinear)
        for leaf, parameter in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
            values.append(parameter.detach())
            tensors[f"{name}.{leaf}"] = torch.empty_like(values[-1], dtype=module.weight.dtype)
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
    weights = {f"{PREFIX}{name}{SUFFIX}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if base_checksums:
        (folder / BASE_FILE).write_text(json.dumps(dict(base_checksums)) + "\n")
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
        # PEFT matches these as `inject_lora` does: by the end of a module's name.
        "target_modules": list(options.targets) or sorted({name.rsplit(".", 1)[-1] for name in names}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
