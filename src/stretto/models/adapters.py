"""LoRA adapters on disk: reading one, putting it into a model, and adding it to the weights of its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from stretto.errors import ModelError
from stretto.models.adapter_config import AdapterConfig, read_adapter_config
from stretto.models.expert_adapters import from_peft, is_expert_adapter, parameter_name
from stretto.models.lora import (
    ADAPTED,
    BASE_FILE,
    PREFIX,
    SUFFIX,
    WEIGHTS_FILE,
    adapted_experts,
    adapted_modules,
    adapter_names,
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read: `<module>.lora_A` [r, in] and `<module>.lora_B` [out, r] of every adapted module.

    Those on experts have an axis of experts before these two.
    """

    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    base_checksums: Mapping[str, str]  # of its base, by the name of a type; empty: not recorded

    @property
    def modules(self) -> set[str]:
        """The names of the adapted modules."""
        return {name.rpartition(".")[0] for name in self.tensors}


def read_adapter(path: str | Path) -> Adapter:
    """Reads an adapter, or the policy of a run. Raises `ModelError` if it cannot be read, or is not supported."""
    config = read_adapter_config(path)
    file = config.folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as read:
            tensors = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in `{config.folder}` cannot be read: {error}") from error
    named = {name.removeprefix(PREFIX).removesuffix(SUFFIX): tensor for name, tensor in tensors.items()}
    if wrong := next((name for name in named if not name.endswith((".lora_A", ".lora_B"))), None):
        raise ModelError(
            f"the adapter in `{config.folder}` cannot be used: `{wrong}` is no part of a plain LoRA adapter"
        )
    try:
        named = from_peft(named, config.parameters, config.rank)
    except RuntimeError as error:
        raise ModelError(f"the adapter in `{config.folder}` has no shapes of rank {config.rank}: {error}") from error
    return Adapter(config, named, _base_checksums(config.folder))


def _base_checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums of an adapter's base that were written beside it; none if they cannot be read."""
    try:
        found = json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def adapter_digest(path: str | Path) -> str:
    """Returns a digest of the files of an adapter."""
    config = read_adapter_config(path)
    digest = hashlib.blake2b(f"{config.rank} {config.alpha!r} {config.targets}".encode(), digest_size=16)
    try:
        with (config.folder / WEIGHTS_FILE).open("rb") as file:
            digest.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
    except OSError as error:
        raise ModelError(f"the adapter in `{config.folder}` cannot be read: {error}") from error
    return digest.hexdigest()


def install_adapter(model: nn.Module, adapted: Sequence[str], adapter: Adapter) -> None:
    """Gives the injected adapters of a model the values of `adapter`. Raises `ModelError` if they do not fit."""
    _refuse_other_modules({name: adapted_weight(model, name) for name in adapted}, adapter)
    with torch.no_grad():
        for name in adapted:
            layer = model.get_submodule(name)
            assert isinstance(layer, ADAPTED)
            layer.lora_A.copy_(adapter.tensors[f"{name}.lora_A"])
            layer.lora_B.copy_(adapter.tensors[f"{name}.lora_B"])


def merge_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Adds an adapter to the weights of its base: `W + scale * B A`, in float32, rounded to the type of the base.

    Raises `ModelError` if it does not fit.
    """
    targets = adapter.config.targets
    names = (*adapted_modules(model, targets), *adapter_names(adapted_experts(model, targets)))
    weights = {name: adapted_weight(model, name) for name in names}
    _refuse_other_modules(weights, adapter)
    with torch.no_grad():
        for name, weight in weights.items():
            down, up = (
                adapter.tensors[f"{name}.{leaf}"].to(weight.device, torch.float32) for leaf in ("lora_A", "lora_B")
            )
            weight.copy_(weight.float().add_(up @ down, alpha=adapter.config.scale))


def adapted_weight(model: nn.Module, name: str) -> torch.Tensor:
    """Returns the weight that the adapter of this name is added to: [out, in], or [experts, out, in]."""
    if is_expert_adapter(name):
        return model.get_parameter(parameter_name(name))
    linear: Any = model.get_submodule(name)
    weight: torch.Tensor = linear.weight
    return weight


def _refuse_other_modules(weights: Mapping[str, torch.Tensor], adapter: Adapter) -> None:
    """Raises `ModelError` if an adapter is not one of exactly these layers, whose weights are given."""
    folder, rank = adapter.config.folder, adapter.config.rank
    if other := sorted(adapter.modules - weights.keys()):
        raise ModelError(
            f"the adapter in `{folder}` is of another base: it adapts `{other[0]}`, which is not adapted here"
        )
    if missing := sorted(weights.keys() - adapter.modules):
        raise ModelError(f"the adapter in `{folder}` is of another base: it has nothing for the layer `{missing[0]}`")
    for name, weight in weights.items():
        *experts, out, width = weight.shape
        for leaf, shape in (("lora_A", (*experts, rank, width)), ("lora_B", (*experts, out, rank))):
            found = adapter.tensors.get(f"{name}.{leaf}")
            if found is None or tuple(found.shape) != shape:
                has = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
                raise ModelError(
                    f"the adapter in `{folder}` is of another base: `{name}.{leaf}` {has}, and the layer needs {shape}"
                )


def refuse_another_base(adapter: Adapter, path: str, checksum: str, dtype: torch.dtype) -> None:
    """Raises `ModelError` if an adapter was trained on another base than `path`, whose weights have `checksum`.

    The checksum decides if the adapter has one for the same type; otherwise the names do.
    """
    config, name = adapter.config, str(dtype).removeprefix("torch.")
    if (recorded := adapter.base_checksums.get(name)) is not None:
        if recorded != checksum:
            raise ModelError(
                f"the adapter in `{config.folder}` is of another base than `model.path = {path!r}`: it was trained on "
                f"`{config.base}`, whose weights have the checksum {recorded} in {name}, and these have {checksum}; "
                "give that base, or an adapter of this one"
            )
        return
    if (
        adapter.base_checksums
        or not config.base
        or _last(config.base) == _last(path)
        or config.base_path != config.base
    ):
        return
    raise ModelError(
        f"the adapter in `{config.folder}` is of another base: it names `{config.base}`, and `model.path` is `{path}`; "
        "if these are the same model, correct `base_model_name_or_path` in its `adapter_config.json`"
    )


def _last(path: str) -> str:
    """Returns the last part of a folder or of a hub name, in small letters."""
    return Path(path).name.lower()
