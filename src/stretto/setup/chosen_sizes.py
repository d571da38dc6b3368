"""The sizes of a run that memory decides, in the order in which they are chosen.

Each choice plans beside those before it: first the rows (`rollout_rows.py`), then the tokens of a prefill
(`prefill_chunk_size.py`), then those of a micro-batch (`micro_batch_size.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.prefill_chunk_size import with_prefill_tokens
from stretto.setup.rollout_rows import with_rows


def with_chosen_sizes(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int | None = None,
) -> Recipe:
    """Returns the recipe with the sizes that it leaves to memory.

    `counted` are its models; None: they are counted here, if they are needed. `free` are the bytes to plan with; None
    asks the device. The result is the same for the same memory, recipe and prompts.
    """
    for choose in (with_rows, with_prefill_tokens, with_micro_tokens):
        recipe = choose(recipe, config, longest_prompt, device, counted=counted, free=free)
    return recipe
