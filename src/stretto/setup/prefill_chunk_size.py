"""The number of tokens that `rollout.prefill_tokens = "auto"` means on a GPU.

Large prefills fill the device better, and attention within one chunk does without pages. But their workspace takes
memory from the KV cache. So a larger chunk is chosen only if it takes at most `SHARE` of what the plan has to spare
with the smallest one. A plan that fits with the smallest chunk fits with the chosen one too.

In a run in one process the number is recorded. On a cluster the recipe keeps `auto`, and each instance chooses for its
own device.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.recipe.schema import PREFILL_TOKENS, Recipe
from stretto.setup.device import with_section
from stretto.setup.memory import count_weights, spare_bytes, without_kv
from stretto.setup.micro_batch_size import SIZES as MICRO_SIZES

SIZES = (8_192, 4_096, PREFILL_TOKENS)
SHARE = 0.1  # of the memory that the plan has to spare with the smallest chunk


def with_prefill_tokens(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    free: int | None = None,
    trains: bool = True,
) -> Recipe:
    """Returns the recipe with a number for `rollout.prefill_tokens`, if it is `auto` and the device is a GPU.

    `free` are the bytes to plan with; None asks the device. Without `trains` the plan is for an instance alone. The
    number is the same for the same memory, recipe and prompts. Call it before `with_micro_tokens`, which plans beside
    the engine.
    """
    if recipe.rollout.prefill_tokens != "auto" or device.type != "cuda":
        return recipe
    sized = [with_section(recipe, "rollout", prefill_tokens=size) for size in SIZES]
    smallest = sized[-1]
    if recipe.runtime.deterministic:  # a chunk is padded to a power of two there, so a large one may be half padding
        return smallest
    least = smallest
    if recipe.training.micro_tokens == "auto":
        least = with_section(smallest, "training", micro_tokens=MICRO_SIZES[-1])
    counted = count_weights(recipe, config, device)
    spare = spare_bytes(least, config, counted, longest_prompt, device, free=free, trains=trains)
    workspaces = [without_kv(each, config, counted, longest_prompt, device, 0).engine for each in sized]
    more = (workspace - workspaces[-1] for workspace in workspaces)
    return next(each for each, extra in zip(sized, more, strict=True) if extra <= SHARE * spare or each is smallest)


def describe_prefill_tokens(asked: Recipe, recipe: Recipe) -> list[str]:
    """Returns a line on what `auto` became and why, if it became something."""
    size = recipe.rollout.prefill_chunk_tokens
    if asked.rollout.prefill_tokens == recipe.rollout.prefill_tokens:
        return []
    if recipe.runtime.deterministic:
        why = "`runtime.deterministic` pads each chunk to a power of two"
    elif size == SIZES[0]:
        why = "the largest"
    else:
        why = "a larger one would take too much memory from KV"
    where = "; each instance chooses for its own device" if recipe.runtime.type == "ray" else ""
    return [f"`rollout.prefill_tokens = {size}` (auto): {why}{where}"]
