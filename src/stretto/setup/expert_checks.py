"""The check of adapters on experts, before a model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stretto.engines.native.expert_slots import refuse_many_groups
from stretto.models.lora import adapted_experts
from stretto.models.routing import is_mixture, num_experts
from stretto.recipe.schema import Recipe


def expert_targets(recipe: Recipe, config: Any) -> tuple[str, ...]:
    """Returns the names of the Parameters of experts that the recipe adapts."""
    if recipe.model.lora is None or not is_mixture(config):
        return ()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = adapted_experts(model, recipe.model.lora.targets)
    return tuple(sorted({each for projections in found.values() for each in projections}))


def check_expert_slots(recipe: Recipe, config: Any) -> None:
    """Raises `ModelError` if the recipe adapts more experts, in more version slots, than the native engine can.

    `runtime.device` has to be known.
    """
    if recipe.engine.type != "native" or recipe.runtime.device != "cuda" or not expert_targets(recipe, config):
        return
    refuse_many_groups(num_experts(config), recipe.num_slots)
