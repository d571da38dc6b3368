"""The phases of a run: parts with one recipe each. `--resume` with another recipe begins a new phase.

The journal has the first update and the resolved recipe of every phase. The recipe of an update is that of the last
phase that began with it or before. Trainer, resumed runs, `replay` and `verify --recompute` go by the phase of an
update; `run/recipe_changes.py` says what may change from one phase to the next.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import JournalError, RecipeError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.store.reader import JournalReader
from stretto.store.schema import RESTORE
from stretto.training.learning_rates import LearningRates


@dataclass(frozen=True, slots=True)
class Phases:
    """The first update of each phase, in order, and its recipe. There is at least one."""

    parts: tuple[tuple[int, Recipe], ...]

    @classmethod
    def only(cls, recipe: Recipe) -> Phases:
        """Returns the phases of a run that has always had one recipe."""
        return cls(((0, recipe),))

    @classmethod
    def recorded(cls, journal: Path) -> Phases | None:
        """Returns the phases that a journal has; None if it has none. Raises `JournalError` for a damaged recipe."""
        with JournalReader(journal) as reader:
            records = reader.phases()
        parts = []
        for record in records:
            try:
                parts.append((record.first_update, parse_recipe(tomllib.loads(record.recipe))))
            except (ValueError, RecipeError) as error:
                raise JournalError(
                    f"journal `{journal}` has a recipe of phase {record.phase} that cannot be read: {error}; {RESTORE}"
                ) from error
        return cls(tuple(parts)) if parts else None

    def followed_by(self, first_update: int, recipe: Recipe) -> Phases:
        """Returns the phases with another one that begins with `first_update`."""
        return Phases((*self.parts, (first_update, recipe)))

    def with_current(self, recipe: Recipe) -> Phases:
        """Returns the phases with the recipe of the last one as it is resolved on this machine."""
        return Phases((*self.parts[:-1], (self.parts[-1][0], recipe)))

    @property
    def current(self) -> Recipe:
        """The recipe of the last phase."""
        return self.parts[-1][1]

    def of(self, update: int) -> Recipe:
        """Returns the recipe of an update."""
        return next(recipe for first, recipe in reversed(self.parts) if first <= update)

    @property
    def learning_rates(self) -> LearningRates:
        """The learning rate of every update."""
        return LearningRates(tuple((first, recipe.training) for first, recipe in self.parts))

    @property
    def sampled_ages(self) -> int:
        """An update gets the weights of versions up to so much older, as `Recipe.sampled_ages`.

        A group keeps the staleness that it was admitted under, so the largest of all phases counts.
        """
        return max(recipe.sampled_ages for _, recipe in self.parts)

    @property
    def retrained_ages(self) -> int:
        """The same for an update that is trained again."""
        return max(recipe.retrained_ages for _, recipe in self.parts)

    def evaluates(self, version: int) -> bool:
        """True if a version is evaluated during the run, by the phase of the update that made it."""
        plan = self.of(version - 1).plan
        return plan.evaluate_every > 0 and version % plan.evaluate_every == 0 and version < plan.updates
