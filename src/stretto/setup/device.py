"""The device of a run and the type of its weights: the meaning of `auto` on this machine."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.engines.native.capture_lock import release_cached
from stretto.errors import RecipeError
from stretto.recipe.checks import idle_rows
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import Recipe
from stretto.run.recipe_changes import RESOLVED_KEYS
from stretto.setup.compile_cache import keep_compiled
from stretto.types import Weights

CUDA = torch.device("cuda", 0)  # the first visible device, which is the default of every new thread
CONTEXT_GIB = 0.6  # of a CUDA context with its libraries, outside of torch's allocator


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
    if recipe.runtime.device_gib is not None and device.type == "cpu":
        raise RecipeError(
            f"`runtime.device_gib = {recipe.runtime.device_gib:g}` has no effect on the CPU: it limits the memory of a "
            "GPU; leave it out. To plan for a GPU that is not here, use "
            f"`stretto check RECIPE --devices 1x{recipe.runtime.device_gib:g}GiB`"
        )
    if recipe.engine.gpu_memory is not None and device.type == "cpu":
        raise RecipeError(
            f"`engine.gpu_memory = {recipe.engine.gpu_memory:g}` has no effect on the CPU: it is a share of the memory "
            "of a GPU; leave it out"
        )
    dtype = str(choose_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    recipe = with_section(with_section(recipe, "model", dtype=dtype), "runtime", device=device.type)
    if device.type == "cpu":  # on CUDA memory decides: `setup/micro_batch_size.py`, `setup/prefill_chunk_size.py`
        recipe = with_section(recipe, "training", micro_tokens=recipe.training.micro_batch_tokens)
        recipe = with_section(recipe, "rollout", prefill_tokens=recipe.rollout.prefill_chunk_tokens)
    for problem in idle_rows(recipe.plan):
        raise RecipeError(problem)
    return recipe


def as_begun(recipe: Recipe, folder: Path) -> Recipe:
    """Returns the recipe of a resumed run with what the run began with, wherever the recipe says `auto`."""
    path = folder / "config.toml"
    if not path.is_file():
        return recipe
    begun = tomllib.loads(path.read_text(encoding="utf-8"))
    for section, _, key in (name.partition(".") for name in RESOLVED_KEYS):
        if getattr(getattr(recipe, section), key) == "auto":
            recipe = with_section(recipe, section, **{key: begun.get(section, {}).get(key, "auto")})
    return recipe


def free_bytes(recipe: Recipe, device: torch.device) -> int:
    """Returns the memory of a GPU that the run may still take: what is free, within `runtime.device_gib`.

    Memory that an earlier run of this process has left in the allocator's cache is released first: it is free for any
    use, and for other processes, such as those of vLLM.
    """
    release_cached()
    left = int(torch.cuda.mem_get_info(device)[0])
    limit = recipe.runtime.device_gib
    return left if limit is None else min(left, device_limit(limit) - torch.cuda.memory_reserved(device))


def total_bytes(recipe: Recipe, device: torch.device) -> int:
    """Returns the memory of a GPU, of which some may be taken: all of it, or what `runtime.device_gib` leaves."""
    total = int(torch.cuda.mem_get_info(device)[1])
    limit = recipe.runtime.device_gib
    return total if limit is None else min(total, device_limit(limit))


def planned_bytes(recipe: Recipe, planned: PlannedDevices) -> int:
    """Returns the memory of a device that is not here that a run may take, within `runtime.device_gib`."""
    return device_limit(min(planned.gib, recipe.runtime.device_gib or planned.gib))


def device_limit(gib: float) -> int:
    """Returns the bytes that the allocator may have on a device of `gib` GiB: the CUDA context has the rest."""
    return int((gib - CONTEXT_GIB) * (1 << 30))


def prepare_device(recipe: Recipe, device: torch.device) -> None:
    """Prepares this process for work on a GPU: compiled code is kept, memory is limited to `runtime.device_gib`.

    Beyond the limit the allocator fails, as it would on such a device. Call before anything is compiled.
    """
    keep_compiled(device)
    if device.type != "cuda":
        return
    limit, total = recipe.runtime.device_gib, torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if limit is None else min(1.0, max(0, device_limit(limit)) / total)
    torch.cuda.set_per_process_memory_fraction(share, device)


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
