"""The number of tokens that `rollout.prefill_tokens = "auto"` means on a GPU.

Large prefills fill the device better, and attention within one chunk does without pages. But their workspace takes
memory from micro-batches and the KV cache, which is worth more on a small device. So a larger chunk is chosen only if
its workspace takes at most `SHARE` of the memory that is free at the start. A plan that fits with the smallest chunk
fits with the chosen one too.

In a run in one process the number is recorded. On a cluster the recipe keeps `auto`, and each instance chooses for its
own device.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from stretto.recipe.schema import PREFILL_TOKENS, Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import choose_dtype, free_bytes, with_section
from stretto.setup.memory_needs import instances_per_device, spare_bytes
from stretto.setup.memory_sizes import engine_bytes
from stretto.setup.micro_batch_size import SIZES as MICRO_SIZES

log = logging.getLogger(__name__)

SIZES = (8_192, 4_096, PREFILL_TOKENS)
SHARE = 0.02  # of the memory that is free at the start


def with_prefill_tokens(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int | None = None,
    trains: bool = True,
) -> Recipe:
    """Returns the recipe with a number for `rollout.prefill_tokens`, if it is `auto` and the device is a GPU.

    `counted` are its models; None: they are counted here, if they are needed. `free` are the bytes to plan with; None
    asks the device. Without `trains` the plan is for an instance alone; with it, the recipe of a cluster keeps `auto`.
    The number is the same for the same memory, recipe and prompts.
    """
    if recipe.rollout.prefill_tokens != "auto" or device.type != "cuda" or (recipe.runtime.type == "ray" and trains):
        return recipe
    sized = [with_section(recipe, "rollout", prefill_tokens=size) for size in SIZES]
    smallest = sized[-1]
    if recipe.runtime.deterministic:  # a chunk is padded to a power of two there, so a large one may be half padding
        return smallest
    least = smallest
    if recipe.training.micro_tokens == "auto":
        least = with_section(smallest, "training", micro_tokens=MICRO_SIZES[-1])
    counted = counted or count_models(recipe, config, device)
    spare = spare_bytes(least, config, counted, longest_prompt, device, free=free, trains=trains)
    text, dtype = config.get_text_config(), choose_dtype(recipe.model.dtype, device)
    engines = instances_per_device(recipe) * recipe.engine.tensor_parallel
    workspaces = [engines * engine_bytes(each, text, counted.policy, dtype) for each in sized]
    more = (workspace - workspaces[-1] for workspace in workspaces)
    most = min(spare, SHARE * (free_bytes(recipe, device) if free is None else free))
    return next(each for each, extra in zip(sized, more, strict=True) if extra <= most or each is smallest)


def for_instance(
    recipe: Recipe, config: Any, counted: CountedModels, longest_prompt: int, device: torch.device, free: int | None
) -> Recipe:
    """Returns the recipe of a rollout instance with a process for itself, and logs what it has chosen."""
    chosen = with_prefill_tokens(recipe, config, longest_prompt, device, counted=counted, free=free, trains=False)
    for line in describe_prefill_tokens(recipe, chosen):
        log.info(line)
    return chosen


def describe_prefill_tokens(asked: Recipe, recipe: Recipe) -> list[str]:
    """Returns a line on what `auto` became and why, if it became something."""
    size = recipe.rollout.prefill_chunk_tokens
    if asked.rollout.prefill_tokens == recipe.rollout.prefill_tokens:
        return []
    if recipe.runtime.deterministic:
        why = "`runtime.deterministic` pads each chunk to a power of two"
    elif size == SIZES[0]:
        why = f"the largest of {', '.join(map(str, SIZES))}"
    else:
        why = "the workspace of a larger one would take too much of the memory"
    chooses = recipe.runtime.type == "ray" and not recipe.runtime.deterministic
    where = "; each instance chooses for its own device" if chooses else ""
    return [f"`rollout.prefill_tokens = {size}` (auto): {why}{where}"]
