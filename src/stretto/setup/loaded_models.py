"""The models that a run loads beside its policy: teachers and reward models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.models.folder_digest import folder_digest
from stretto.recipe.schema import Recipe
from stretto.setup.scorers import scorers_of
from stretto.setup.teachers import teacher_sources


def model_digests(recipe: Recipe) -> dict[str, str]:
    """Returns the digest of each folder of a teacher or a reward model, by its path as the recipe writes it.

    Models of the hub have none, and neither has a folder that cannot be read. Of an adapter, its base is left out.
    """
    found = {}
    for name, folder in _folders(recipe):
        try:
            found[name] = folder_digest(folder)
        except OSError:
            continue
    return found


def _folders(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    for teacher in teacher_sources(recipe):
        folder = teacher.adapter or Path(teacher.path)
        if folder.is_dir():
            yield teacher.name, folder
    for task in recipe.tasks:
        for scorer in scorers_of(task).values():
            if isinstance(scorer, RewardModelOptions) and Path(scorer.path).is_dir():
                yield scorer.path, Path(scorer.path)
