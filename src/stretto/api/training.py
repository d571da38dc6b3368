"""`train` of the Python interface: a recipe, and what a notebook or a script has at hand, become a run."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.event_loops import call_apart
from stretto.api.runs import Run
from stretto.environments.given import Given, GivenRewards, GivenRows
from stretto.errors import RecipeError, RunError
from stretto.observe.listeners import Listeners
from stretto.recipe.overrides import Overrides
from stretto.run.folder_checks import default_run_folder, refuse_nothing_to_resume, refuse_occupied
from stretto.run.handle import RunHandle
from stretto.setup.garbage import collect_earlier_runs

if TYPE_CHECKING:
    from stretto.observe.progress import Observer
    from stretto.recipe.schema import Recipe

log = logging.getLogger(__name__)


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    reward: GivenRewards | None = None,
    data: GivenRows | Mapping[str, GivenRows] | None = None,
    evaluation_data: GivenRows | Mapping[str, GivenRows] | None = None,
    environment: Any = None,
    callbacks: Iterable[object] = (),
    progress: bool | Observer = True,
    give_up: Sequence[int] = (),
) -> Run:
    """Trains a policy and returns its run, when that is finished or was stopped.

    - `recipe`: a TOML file, its tables as nested mappings, or a `Recipe`. None, with `resume`: the run's own.
    - `overrides`: dotted keys with their values (None removes a key), or strings as after `--set`.
    - `out`: the run folder; by default a new one in `runs/`. With `resume`, the run in it is continued.
    - `reward`: a function `reward(prompt, completion, **row)`, plain or `async`, for a task of rows; one of batches, as
      TRL calls it; or a list of such functions and of `Reward`, which has a weight: then their weighted sum counts.
    - `data`: the rows, each a mapping with `prompt` or `messages`, or with other names by `task.columns`: a list or any
      iterable, a split of the package datasets, or a data frame. `evaluation_data`: rows to evaluate on, by default
      split from `data`. With `data` and `reward` the recipe needs no `[task]`.
    - `environment`: a class or an object that plays episodes, instead of `reward`.
    - With several tasks these four are given by label: `reward={"math": exact}`.
    - `callbacks`: functions that get each update's line, or objects with methods of `Callback`.
    - `progress`: False prints no progress. Warnings go to the logger `stretto` in any case.
    - `give_up`: trajectories that a resumed run fails instead of training on them.

    Ctrl-C, or the interrupt of a notebook's cell, stops the run at the next update boundary; it returns with
    `run.stopped`, and `resume=True` continues it. Raises `RecipeError` and `RunError` before anything is built if
    something is wrong, and `KeyboardInterrupt` if the run is interrupted while it starts.
    """
    given = Given.of(reward=reward, environment=environment, data=data, evaluation_data=evaluation_data)
    if resume and out is None:
        raise RunError("`resume` needs `out`: the folder of the run to continue")
    if recipe is None and not resume:
        raise RecipeError("`recipe` is None: give one; only a run that is continued with `resume=True` has its own")
    folder = default_run_folder(_named(recipe)) if out is None else Path(out).expanduser()
    if resume:
        refuse_nothing_to_resume(folder)
    else:
        refuse_occupied(folder)

    from stretto.recipe.reading import load_recipe
    from stretto.recipe.shipped_recipes import refuse_missing_files
    from stretto.run.recipe_changes import accepted_changes, current_recipe

    if resume:
        given = given.as_recorded(recorded_task(folder))
    written = current_recipe(folder) if recipe is None else recipe
    source = str(folder / "config.toml") if recipe is None else None
    change_task = None if given.is_nothing else given.in_recipe
    made = load_recipe(written, overrides or (), change_task=change_task, source=source, say=log.warning)
    if not resume:
        refuse_missing_files(recipe, *made.tasks)
    if resume:
        accepted_changes(made, folder)
    handle = RunHandle(folder)
    run = handle.shown = Run(folder, handle)
    listeners = Listeners(callbacks)
    observer = _observer(progress, made)

    from stretto.assembly.train import train as trained

    collect_earlier_runs()

    try:
        call_apart(
            lambda: trained(
                made,
                folder,
                resume=resume,
                observer=observer,
                give_up=give_up,
                given=given,
                listeners=listeners,
                handle=handle,
            ),
            handle.interrupt,
        )
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        if handle.outcome != "finished":  # else the last evaluation was skipped
            raise KeyboardInterrupt from error
    return run


def recorded_task(folder: Path) -> Any:
    """Returns the table `[task]`, or the tables `[[task]]`, that a run was started with.

    Empty if that cannot be read, which is refused later.
    """
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get("task", {})
    except (OSError, ValueError):
        return {}


def _named(recipe: str | Path | Mapping[str, Any] | Recipe | None) -> Path:
    """Returns the path that the default folder is named after."""
    return Path(recipe) if isinstance(recipe, str | Path) else Path("run.toml")


def _observer(progress: bool | Observer, recipe: Recipe) -> Observer:
    from stretto.observe.console import make_console
    from stretto.observe.progress import Silent, make_observer

    if not isinstance(progress, bool):
        return progress
    return make_observer(make_console(), recipe.training.steps) if progress else Silent()
