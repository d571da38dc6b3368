"""The number of rows that memory has room for in a run that starts ahead (`Recipe.starts_ahead`).

By default every trajectory in flight has a row. Rows cost memory: buffers for their logits, and KV. So there are fewer,
in steps of half a batch and never below one batch, unless all of this holds:

- the buffers of the rows beyond one batch take at most `SHARE` of the memory that is free at the start;
- the KV that the rows should have takes at most the share that micro-batches leave to it. With less, rows would push
  each other out of the cache;
- a micro-batch has `MICRO_TOKENS` at least, or the whole batch. For rows of up to two batches,
  `MICRO_TOKENS_SECOND_BATCH` will do: the second batch of rows has most of what more rows gain
  (`docs/performance.md`, SmolLM2-135M).

The most that a larger prefill may take (`prefill_chunk_size.py`) is left out of the memory for KV and micro-batches,
because it is chosen afterwards. None of these limits depends on what fewer rows would leave, so that more memory never
makes rows fewer.

With fewer rows, fewer groups are in flight by default. Like the size of the KV cache, this is found at every start and
is not recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.recipe.schema import Recipe, RowLimit
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
from stretto.setup.prefill_chunk_size import SHARE as PREFILL_SHARE

SHARE = 0.05  # of the memory that is free at the start
MICRO_TOKENS = 16_384  # of a micro-batch; larger ones gain little
MICRO_TOKENS_SECOND_BATCH = 8_192  # of a micro-batch beside at most two batches of rows


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
    asks the device. The result is the same for the same memory, recipe and prompts.
    """
    batch, most = batch_rows(recipe), recipe.plan.rows
    if recipe.rollout.rows is not None or not recipe.starts_ahead or most <= batch:
        return recipe
    free = free_bytes(recipe, device) if free is None else free
    models, dtype = counted or count_models(recipe, config, device), choose_dtype(recipe.model.dtype, device)
    text, instances = config.get_text_config(), instances_per_device(recipe)
    one = longest_trajectory(recipe, longest_prompt)
    per_token = kv_bytes_per_token(text, dtype, records_routing=recipe.training.records_routing)
    kept = int(PREFILL_SHARE * free) if recipe.rollout.prefill_tokens == "auto" else 0

    def buffers(sized: Recipe) -> int:
        return instances * engine_bytes(sized, text, models.policy, dtype)

    def objection(sized: Recipe) -> str | None:
        """Returns why there is no room for its rows; None if there is."""
        short = f"memory is too short for {sized.plan.rows} rows"
        need = without_kv(sized, config, models, longest_prompt, device, free)
        wanted, given = instances * wanted_kv_tokens(sized, one), recipe.rollout.kv_tokens
        if given is not None and wanted > given:
            return f"`rollout.kv_tokens = {given}` is too small for {sized.plan.rows} rows, which should have {wanted}"
        if given is None and wanted * per_token > KV_SHARE * (free - kept - (need.without_kv - need.working)):
            return f"{short}: their KV would leave too little for micro-batches"
        if recipe.training.micro_tokens == "auto":
            tokens = MICRO_TOKENS if sized.plan.rows > 2 * batch else MICRO_TOKENS_SECOND_BATCH
            tokens = min(tokens, batch_tokens(recipe, one))
            if fitting_size(sized, config, models, longest_prompt, device, free, kept=kept) < tokens:
                return (
                    f"{short}: micro-batches beside them would be below {tokens:,} tokens; set `rollout.rows` or "
                    "`training.micro_tokens` to choose yourself"
                )
        if buffers(sized) - buffers(least) > SHARE * free:
            return f"{short}: their buffers would take more than {100 * SHARE:.0f} % of the free memory"
        return None

    least = _with_row_limit(recipe, batch)
    reason = objection(recipe)
    if reason is None:
        return recipe
    step = max(1, batch // 2)
    tried = (_with_row_limit(recipe, rows, reason) for rows in range(most - step, batch, -step))
    return next((each for each in tried if objection(each) is None), _with_row_limit(recipe, batch, reason))


def _with_row_limit(recipe: Recipe, rows: int, reason: str = "") -> Recipe:
    """Returns the recipe with room for so many rows."""
    changed = with_section(recipe, "rollout")
    changed.rollout._row_limit = RowLimit(rows, reason)
    return changed


def describe_rows(asked: Recipe, recipe: Recipe) -> list[str]:
    """Returns a line on the rows and groups in flight that memory allows, if they are fewer than the defaults."""
    before, plan, limit = asked.plan, recipe.plan, recipe.rollout._row_limit
    if limit is None:
        return []
    flight = "" if before.in_flight == plan.in_flight else f", `rollout.in_flight = {plan.in_flight}`"
    return [f"`rollout.rows = {plan.rows}`{flight}: {limit.reason}"]
