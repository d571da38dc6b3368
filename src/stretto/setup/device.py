"""The device of a run and the type of its weights: the meaning of `auto` on this machine."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.errors import RecipeError
from stretto.recipe.schema import Recipe
from stretto.types import Weights

CUDA = torch.device("cuda", 0)  # the first visible device, which is the default of every new thread


def choose_device(wanted: str) -> torch.device:
    """Returns the device that `runtime.device` names."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return CUDA
    if wanted == "auto":
        return torch.device("cpu")
    why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    raise RecipeError(
        f'`runtime.device = "cuda"`, but {why} (see `nvidia-smi` and `CUDA_VISIBLE_DEVICES`); use "cpu" or "auto"'
    )


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Returns the type that `model.dtype` names on a device."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def resolved(recipe: Recipe, device: torch.device) -> Recipe:
    """Returns the recipe with the meaning of `auto` on `device` filled in: a run is recorded and resumed with that."""
    if recipe.runtime.deterministic and device.type == "cpu":
        raise RecipeError(
            "`runtime.deterministic = true` has no effect on the CPU, where no trajectory ever depends on its"
            " neighbours: leave it out"
        )
    dtype = str(choose_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    return with_section(with_section(recipe, "model", dtype=dtype), "runtime", device=device.type)


def as_begun(recipe: Recipe, folder: Path) -> Recipe:
    """Returns the recipe of a resumed run with the type that the run began in, if the recipe leaves it open."""
    path = folder / "config.toml"
    if recipe.model.dtype != "auto" or not path.is_file():
        return recipe
    begun = tomllib.loads(path.read_text(encoding="utf-8")).get("model", {}).get("dtype", "auto")
    return with_section(recipe, "model", dtype=begun)


def on_device(weights: Weights, device: torch.device) -> Weights:
    """Returns the same weights in the memory of `device`. The copy is complete on return."""
    moved = replace(weights, tensors={name: tensor.to(device) for name, tensor in weights.tensors.items()})
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return moved


def with_section(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """Returns the recipe with other values in one section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def describe_device(device: torch.device) -> str:
    """Returns the name of the device as text."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
