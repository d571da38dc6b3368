"""The number of tokens that `training.micro_tokens = "auto"` means on the GPU of one process; on a cluster it is 8,192.

Each micro-batch costs the host a fixed time for its launches, and small ones do not fill the device. So the largest one
that fits trains fastest. Its activations take memory from the KV cache: the cache keeps what the rows should have
(`wanted_kv_tokens`), or `KV_SHARE` of what both have together.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import choose_dtype, free_bytes, with_section
from stretto.setup.memory_needs import Footprint, instances_per_device, without_kv
from stretto.setup.memory_sizes import batch_tokens, kv_bytes_per_token, longest_trajectory, wanted_kv_tokens
from stretto.training.options import MICRO_TOKENS

SIZES = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096, 2_048)
KV_SHARE = 0.6  # of the memory that is left for activations and KV


def with_micro_tokens(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int | None = None,
) -> Recipe:
    """Returns the recipe with a number for `training.micro_tokens`, if it is `auto` and the device is a GPU.

    `counted` are its models; None: they are counted here, if they are needed. `free` are the bytes to plan with; None
    asks the device. The number is the same for the same memory, recipe and prompts. If nothing fits, it is the
    smallest, and the plan of the run says what is missing.
    """
    if recipe.training.micro_tokens != "auto" or device.type != "cuda":
        return recipe
    if recipe.runtime.type == "ray":  # ranks have other devices than the driver, and do not try smaller ones
        return with_section(recipe, "training", micro_tokens=MICRO_TOKENS)
    free = free_bytes(recipe, device) if free is None else free
    counted = counted or count_models(recipe, config, device)
    size = fitting_size(recipe, config, counted, longest_prompt, device, free)
    return with_section(recipe, "training", micro_tokens=size)


def fitting_size(
    recipe: Recipe,
    config: Any,
    counted: CountedModels,
    longest_prompt: int,
    device: torch.device,
    free: int,
    *,
    kept: int = 0,
) -> int:
    """Returns the largest of `SIZES` that leaves enough for KV, or the smallest if none does.

    `kept` are bytes that stay free for something else.
    """
    one = longest_trajectory(recipe, longest_prompt)
    batch = batch_tokens(recipe, one)
    for size in SIZES:
        if size >= 2 * batch:
            continue  # the next smaller one holds the whole batch, too
        sized = with_section(recipe, "training", micro_tokens=size)
        need = without_kv(sized, config, counted, longest_prompt, device, free)
        if _leaves_room(sized, config, need, one, device, free - kept):
            return size
    return SIZES[-1]


def describe_micro_tokens(asked: Recipe, recipe: Recipe, longest_prompt: int) -> list[str]:
    """Returns a line on what `auto` became and why, if it became something."""
    size = recipe.training.micro_batch_tokens
    if asked.training.micro_tokens == recipe.training.micro_tokens:
        return []
    if recipe.runtime.type == "ray":
        why = "on a cluster it does not follow the memory"
    elif size >= (batch := batch_tokens(recipe, longest_trajectory(recipe, longest_prompt))):
        why = f"it holds the whole batch, which has at most {batch:,} tokens"
    else:
        why = {SIZES[0]: "the largest", SIZES[-1]: "the smallest"}.get(size, "the most that leaves KV enough memory")
    return [f"`training.micro_tokens = {size}` (auto): {why}"]


def _leaves_room(recipe: Recipe, config: Any, need: Footprint, one: int, device: torch.device, free: int) -> bool:
    """True if the KV cache keeps what the recipe names, or what it should have by default."""
    text, dtype = config.get_text_config(), choose_dtype(recipe.model.dtype, device)
    per_token = kv_bytes_per_token(text, dtype, records_routing=recipe.training.records_routing)
    both = free - (need.without_kv - need.working)
    if recipe.rollout.kv_tokens is not None:
        return need.working <= both - recipe.rollout.kv_tokens * per_token
    tokens = wanted_kv_tokens(recipe, one) * instances_per_device(recipe)
    return need.working <= both - min(tokens * per_token, KV_SHARE * both)
