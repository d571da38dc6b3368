"""The memory that a reward model needs on the device of the run, in bytes. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification

from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.models.loading import load_config
from stretto.recipe.schema import Recipe
from stretto.setup.device import CONTEXT_GIB, choose_dtype
from stretto.setup.scorers import scorers_of, shares_device
from stretto.setup.teacher_memory import LAYER_WIDTHS


@dataclass(frozen=True, slots=True)
class RewardModelSize:
    """A reward model, and the bytes of its process."""

    options: RewardModelOptions
    process: int


def reward_model_sizes(recipe: Recipe, device: torch.device) -> tuple[RewardModelSize, ...]:
    """Returns the sizes of the reward models that have their processes on `device`."""
    scorers = [each for task in recipe.tasks for each in scorers_of(task).values()]
    models = [each for each in scorers if isinstance(each, RewardModelOptions)]
    return tuple(
        RewardModelSize(each, process_bytes(each, device)) for each in models if shares_device(recipe, each, device)
    )


def reward_model_footprint(recipe: Recipe, models: tuple[RewardModelSize, ...], device: torch.device) -> int:
    """Returns the bytes of those of the models that are on `device`, which none is if the recipe is for a cluster."""
    return sum(each.process for each in models if shares_device(recipe, each.options, device))


def process_bytes(options: RewardModelOptions, device: torch.device) -> int:
    """Returns the bytes of a reward model, of a batch that passes through one layer, and of its CUDA context."""
    dtype = choose_dtype(options.dtype, device)
    config = load_config(options.path, option="task.reward_model.path")
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    text = config.get_text_config()
    longest = options.max_tokens or getattr(text, "max_position_embeddings", None) or 0
    tokens = max(options.batch_tokens, min(longest, options.batch_tokens * 4))
    passing = tokens * LAYER_WIDTHS * text.hidden_size * dtype.itemsize
    return int(weights) + int(passing) + int(CONTEXT_GIB * (1 << 30))
