"""`check` of the Python interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.event_loops import call_apart
from stretto.environments.given import Given
from stretto.environments.python_rewards import Rewards
from stretto.recipe.overrides import Overrides

if TYPE_CHECKING:
    from stretto.assembly.check import CheckReport
    from stretto.recipe.schema import Recipe


def check(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Overrides | None = None,
    *,
    reward: Rewards | None = None,
    data: Iterable[Mapping[str, Any]] | None = None,
    evaluation_data: Iterable[Mapping[str, Any]] | None = None,
    environment: Any = None,
) -> CheckReport:
    """Does everything that `train` does before it builds a model, with the same arguments, and reports what it found.

    Printed, the report is the text of `stretto check`: every value that the run would have, notes on its data, and its
    memory plan. Raises what `train` would raise. Leaves no process behind, and writes nothing.
    """
    from stretto.recipe.schema import load_recipe
    from stretto.recipe.shipped_recipes import refuse_missing_files

    given = Given.of(reward=reward, environment=environment, data=data, evaluation_data=evaluation_data)
    made = load_recipe(recipe, overrides or (), change_task=given.in_task if given.names else None)
    refuse_missing_files(recipe, made.task, given.names)

    from stretto.assembly.check import check as checked

    return call_apart(lambda: checked(made, given))
