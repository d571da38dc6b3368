"""Where the model of a recipe is loaded from: its path, the tiny model, or a model with an adapter merged into it."""

from __future__ import annotations

import time

from stretto.models.tiny import WarmStart, tiny_model
from stretto.observe.progress import Observer
from stretto.recipe.schema import Recipe
from stretto.setup.merged_models import merged_model


def model_path_of(recipe: Recipe, observer: Observer) -> str:
    """Returns where the model is loaded from. Makes the tiny model or a merged model if the recipe names one."""
    base = base_path_of(recipe, observer)
    if not recipe.model.merge_adapter or recipe.model.adapter is None:
        return base
    return str(merged_model(base, recipe.model.adapter, observer.message, name=recipe.model.path))


def base_path_of(recipe: Recipe, observer: Observer) -> str:
    """Returns where `model.path` is loaded from. Makes the tiny model, and shows its progress."""
    if not recipe.model.is_tiny:
        return recipe.model.path
    options = recipe.model.warm_start
    shown_at = time.monotonic()

    def progress(step: int, steps: int, loss: float) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= 5.0 or step == steps:
            shown_at = time.monotonic()
            observer.message(f"warm start of the tiny model: step {step}/{steps}, loss {loss:.3f}")

    warm_start = WarmStart() if options is None or options.steps is None else WarmStart(steps=options.steps)
    seed, mixture = 0 if options is None else options.seed, recipe.model.path == "tiny-moe"
    return str(tiny_model(seed=seed, warm_start=warm_start, progress=progress, mixture=mixture))
