"""Where the model of a recipe is loaded from: its path, or what is made of it before the run.

That is the tiny model, a model with an adapter merged into it, or one that was trained on demonstrations.
"""

from __future__ import annotations

import time

from stretto.models.tiny import WarmStart, tiny_model
from stretto.observe.progress import Observer
from stretto.recipe.schema import Recipe
from stretto.setup.merged_models import merged_model
from stretto.setup.warm_starts import has_demonstrations, warm_started


def model_path_of(recipe: Recipe, observer: Observer) -> str:
    """Returns where the model is loaded from. Makes what the recipe asks for: tiny, merged or warm-started."""
    base = _frozen_path(recipe, observer)
    if recipe.model.lora is None and has_demonstrations(recipe):
        return str(warm_started(recipe, base, observer.message))
    return base


def starting_adapter(recipe: Recipe, observer: Observer) -> str | None:
    """Returns the adapter that the policy begins with; None: a new one. Makes it if the recipe has a warm start."""
    if recipe.model.lora is not None and has_demonstrations(recipe):
        return str(warm_started(recipe, _frozen_path(recipe, observer), observer.message))
    return recipe.model.continued_adapter


def _frozen_path(recipe: Recipe, observer: Observer) -> str:
    """Returns where the model is loaded from before its warm start."""
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

    own = options if options is not None and options.path is None else None  # demonstrations come after it
    warm_start = WarmStart() if own is None or own.steps is None else WarmStart(steps=own.steps)
    seed, mixture = 0 if options is None else options.seed, recipe.model.path == "tiny-moe"
    return str(tiny_model(seed=seed, warm_start=warm_start, progress=progress, mixture=mixture))
