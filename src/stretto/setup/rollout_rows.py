"""The number of rows that memory has room for in a run that starts ahead (`Recipe.starts_ahead`).

By default every trajectory in flight has a row. Rows cost memory: buffers for their logits, and KV. So there are fewer,
in steps of half a batch and never below one batch, unless all of this holds:

- the buffers of the rows beyond one batch take at most `SHARE` of the memory that is free at the start;
- the KV that the rows should have takes at most the share that micro-batches leave to it. With less, rows would push
  each other out of the cache;
- a micro-batch has `MICRO_TOKENS` at least, or the whole batch.

With fewer rows, fewer groups are in flight by default. Like the size of the KV cache, this is found at every start and
is not recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import choose_dtype, free_bytes, with_section
from stretto.setup.memory_needs import instances_per_device, without_kv
from stretto.setup.memory_sizes import (
    batch_rows,
    batch_tokens,
    engine_bytes,
    kv_bytes_per_token,
    longest_trajectory,
    wanted_kv_tokens,
)
from stretto.setup.micro_batch_size import KV_SHARE, fitting_size

SHARE = 0.05  # of the memory that is free at the start
MICRO_TOKENS = 16_384  # of a micro-batch; larger ones gain little


def with_rows(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int | None = None,
) -> Recipe:
    """Returns the recipe with the most rows that memory has room for, if `rollout.rows` is left out.

    `counted` are its models; None: they are counted here, if they are needed. `free` are the bytes to plan with; None
    asks the device. The result is the same for the same memory, recipe and prompts. Call it before
    `with_prefill_tokens` and `with_micro_tokens`, which plan beside the rows.
    """
    batch, most = batch_rows(recipe), recipe.plan.rows
    if recipe.rollout.rows is not None or not recipe.starts_ahead or most <= batch:
        return recipe
    free = free_bytes(recipe, device) if free is None else free
    models, dtype = counted or count_models(recipe, config, device), choose_dtype(recipe.model.dtype, device)
    text, instances = config.get_text_config(), instances_per_device(recipe)
    one = longest_trajectory(recipe, longest_prompt)
    per_token = kv_bytes_per_token(text, dtype, records_routing=recipe.training.records_routing)

    def buffers(sized: Recipe) -> int:
        return instances * engine_bytes(sized, text, models.policy, dtype)

    def micro_tokens(sized: Recipe) -> int:
        if sized.training.micro_tokens != "auto":
            return MICRO_TOKENS
        return fitting_size(sized, config, models, longest_prompt, device, free)

    least = with_rows_at_most(recipe, batch)
    for rows in range(most, batch, -max(1, batch // 2)):
        sized = with_rows_at_most(recipe, rows)
        need = without_kv(sized, config, models, longest_prompt, device, free)
        room = KV_SHARE * (free - (need.without_kv - need.working))
        if recipe.rollout.kv_tokens is not None:
            room = recipe.rollout.kv_tokens * per_token
        if (
            instances * wanted_kv_tokens(sized, one) * per_token <= room
            and buffers(sized) - buffers(least) <= SHARE * free
            and micro_tokens(sized) >= min(MICRO_TOKENS, batch_tokens(recipe, one))
        ):
            return recipe if rows == most else sized
    return least


def with_rows_at_most(recipe: Recipe, rows: int) -> Recipe:
    """Returns the recipe with room for so many rows, if `rollout.rows` is left out."""
    changed = with_section(recipe, "rollout")
    changed.rollout._rows_at_most = rows
    return changed


def describe_rows(asked: Recipe, recipe: Recipe) -> list[str]:
    """Returns a line on the rows and groups in flight that memory allows, if they are fewer than the defaults."""
    before, plan = asked.plan, recipe.plan
    if before.rows == plan.rows:
        return []
    flight = "" if before.in_flight == plan.in_flight else f", `rollout.in_flight = {plan.in_flight}`"
    return [f"`rollout.rows = {plan.rows}`{flight}: memory is too short for {before.rows} rows"]
