"""The models of a run, counted once when it starts: all sizes that memory decides and all plans share that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stretto.models.loading import load_config
from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_dtype
from stretto.setup.parameter_counts import ParameterCounts, count_parameters, meta_model, num_parameters
from stretto.setup.reward_model_memory import RewardModelSize, reward_model_sizes
from stretto.setup.teacher_memory import TeacherSize, teacher_sizes


@dataclass(frozen=True, slots=True)
class CountedModels:
    """The policy of a recipe with its adapters, and the models beside it.

    It holds for every recipe with the same `model`, `algorithm`, `task` and `runtime.type` on the same kind of device,
    whatever the engine, the instances, the lengths and the options of training are.
    """

    policy: ParameterCounts
    teachers: tuple[TeacherSize, ...]
    reference: int  # parameters of the second model that the KL penalty is measured against; 0 if there is none
    reward_models: tuple[RewardModelSize, ...]  # those on the device of the run


def count_models(recipe: Recipe, config: Any, device: torch.device) -> CountedModels:
    """Counts the models of a recipe without allocating them. `config` is that of the policy.

    Raises `ModelError` if the configuration of another model cannot be read.
    """
    policy = count_parameters(config, recipe.model.lora)
    teachers = teacher_sizes(recipe, choose_dtype(recipe.model.dtype, device))
    return CountedModels(policy, teachers, _count_reference(recipe, policy), reward_model_sizes(recipe, device))


def _count_reference(recipe: Recipe, policy: ParameterCounts) -> int:
    """Counts the model for the KL penalty. The policy without its adapters needs no second model."""
    kl = recipe.algorithm.kl
    if kl is None or kl.reference is None:
        return 0
    if kl.reference == recipe.model.path:
        return policy.total
    return num_parameters(meta_model(load_config(kl.reference, option="algorithm.kl.reference")))
