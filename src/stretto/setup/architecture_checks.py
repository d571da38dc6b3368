"""The check of a model's architecture, before its weights are read: engine and trainer must be able to use it.

It runs the model once for the engine and once for the trainer on the meta device, which has shapes and no values. So it
finds what they refuse by the structure of a model. What they refuse by values shows when they are made.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from stretto.engines.native.model_checks import discover, refuse_by_config
from stretto.errors import ModelError, RecipeError
from stretto.models.routing import is_mixture
from stretto.recipe.schema import Recipe
from stretto.setup.vllm_engines import check_vllm_model
from stretto.training.forward import smallest_window

log = logging.getLogger(__name__)

OTHER_MODEL = "choose another model"


def check_architecture(recipe: Recipe, config: Any, longest_prompt: int | None) -> None:
    """Raises `ModelError` if the recipe's engine cannot serve its model, or the trainer cannot train it.

    `longest_prompt` None: it is not known, so trajectories are not compared with a sliding window.
    """
    if recipe.model.is_tiny:
        return
    named, longest = f"`model.path = {recipe.model.path!r}`", None
    if longest_prompt is not None:
        longest = longest_prompt + recipe.rollout.max_tokens
    refused = _refusal(config, _serve_natively) if recipe.engine.type == "native" else None
    untrained = _refusal(config, lambda model: _train(model, longest))
    if refused is not None:
        if untrained is not None:
            raise ModelError(f"{named}: {refused}. Nor can it be trained with another engine: {untrained}")
        fix = f'set `engine.type = "vllm"`, or {OTHER_MODEL}' if _vllm_serves(recipe, config) else OTHER_MODEL
        raise ModelError(f"{named}: {refused}; {fix}")
    if untrained is not None:
        raise ModelError(f"{named}: {untrained}")


def _refusal(config: Any, use: Callable[[nn.Module], None]) -> str | None:
    """Returns why `use` refuses a model of this configuration; None if it does not, or if that shows only later."""
    config = copy.deepcopy(config)
    if is_mixture(config):
        config.get_text_config()._experts_implementation = "batched_mm"  # the others need values
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with torch.inference_mode():
            use(model.eval())
    except ModelError as error:
        return str(error)
    except Exception as error:  # some models need values in their forward
        log.debug("the architecture of `%s` could not be checked: %r", config.model_type, error)
    return None


def _serve_natively(model: nn.Module) -> None:
    refuse_by_config(model)
    discover([model])


def _train(model: nn.Module, longest: int | None) -> None:
    try:
        window = smallest_window(model)
    except ModelError as error:
        raise ModelError(f"{error}; {OTHER_MODEL}") from error
    if window is not None and longest is not None and window < longest:
        raise ModelError(
            f"the trainer has no sliding window, and that of `{type(model).__name__}` is {window:,} tokens: the "
            f"longest prompt with `rollout.max_tokens` takes {longest:,}; lower `rollout.max_tokens`, or {OTHER_MODEL}"
        )


def _vllm_serves(recipe: Recipe, config: Any) -> bool:
    """True if no check of the model refuses the engine `vllm`."""
    engine = recipe.engine.model_copy(update={"type": "vllm"})
    try:
        check_vllm_model(recipe.model_copy(update={"engine": engine}), config)
    except (RecipeError, ModelError):
        return False
    return True
