"""`check` of the Python interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.event_loops import call_apart
from stretto.environments.given import Given, GivenRewards, GivenRows
from stretto.recipe.overrides import Overrides

if TYPE_CHECKING:
    from stretto.assembly.check import CheckReport
    from stretto.recipe.schema import Recipe

log = logging.getLogger(__name__)


def check(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Overrides | None = None,
    *,
    reward: GivenRewards | None = None,
    data: GivenRows | Mapping[str, GivenRows] | None = None,
    evaluation_data: GivenRows | Mapping[str, GivenRows] | None = None,
    environment: Any = None,
    devices: str | None = None,
) -> CheckReport:
    """Does everything that `train` does before it builds a model, with the same arguments, and reports what it found.

    Printed, the report is the text of `stretto check`: every value that the run would have, notes on its data, and its
    memory plan. Raises what `train` would raise. Leaves no process behind, and writes nothing.

    `devices` plans for GPUs that are not here, COUNTxSIZE such as `"8x141GiB"`, as if they were. The report says that
    the recipe fits them; if it does not, the error says how many would do. The `config.json` of the model is enough.
    """
    from stretto.recipe.planned_devices import PlannedDevices
    from stretto.recipe.reading import load_recipe
    from stretto.recipe.shipped_recipes import refuse_missing_files

    planned = None if devices is None else PlannedDevices.parse(devices)
    given = Given.of(reward=reward, environment=environment, data=data, evaluation_data=evaluation_data)
    change_task = None if given.is_nothing else given.in_recipe
    made = load_recipe(recipe, overrides or (), change_task=change_task, say=log.warning)
    refuse_missing_files(recipe, *made.tasks)

    from stretto.assembly.check import check as checked

    return call_apart(lambda: checked(made, given, planned))
