"""The folder of a run: whether a run may begin in it, or be resumed. Imports nothing heavy, to refuse at once.

```
what is in the folder       begin        `--resume`
nothing, or no folder       yes          no: nothing to resume
a finished run              no           yes, with more updates
a run, however it ended     no           yes, if nothing has changed that cannot (`recipe_changes.py`)
a run without its journal   no           no: what it had recorded is gone (`store/traces.py`)
a run that is alive         no           no: another process runs it
anything else               no           no
```
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from stretto.errors import RunError
from stretto.run.command_hint import command
from stretto.store.lock import is_alive
from stretto.store.schema import RESTORE, RunFacts
from stretto.store.traces import recorded_in

if TYPE_CHECKING:
    from stretto.recipe.schema import Recipe

OUT = "`--out` (`out=` in Python)"
RESUME = "`--resume` (`resume=True` in Python)"

Standing = Literal["empty", "finished", "stopped", "lost", "foreign"]
"""The contents of a folder: nothing, a run that is finished, one that was stopped or killed, one whose journal is gone
or has less than it had, or something else."""


def default_run_folder(recipe: Path) -> Path:
    """Returns a run folder that does not exist yet, for a user who names none: `runs/<recipe>-<time>`.

    A second run of the same second has `-2` at the end of its name.
    """
    name = f"{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())


def standing(folder: Path) -> Standing:
    """Returns what a folder holds, without changing anything in it."""
    made_first = (".partial", ".lock")
    if not folder.exists() or (folder.is_dir() and all(path.suffix in made_first for path in folder.iterdir())):
        return "empty"  # or a run was killed as it made the folder
    if not (folder / "config.toml").is_file():
        return "foreign"
    recorded = recorded_in(folder)
    if recorded.complete:
        return "finished"
    return "stopped" if recorded.lost is None else "lost"


def refuse_occupied(folder: Path, *, claimed: bool = False) -> None:
    """Raises `RunError` unless a run can begin in a folder: it is new or empty, and can be written to.

    `claimed`: this process has the lock of the folder. If another has it, a run is starting there.
    """
    match standing(folder):
        case "empty" if not claimed and is_alive(folder):
            hint = f", and a process is starting a run in it; choose another {OUT}"
        case "empty":
            refuse_unwritable(folder)
            return
        case "stopped" | "lost" if is_alive(folder):
            hint = f", and a process runs the run in it; choose another {OUT}"
        case "stopped":
            hint = f"; add {RESUME} to continue the run in it, or choose another {OUT}"
        case "finished":
            hint = f"; add {RESUME} and more `training.steps` to extend the run in it, or choose another {OUT}"
        case _:
            hint = f"; choose another {OUT}"
    raise RunError(f"`{folder}` exists already{hint}")


def refuse_unwritable(folder: Path) -> None:
    """Raises `RunError` if nothing can be written to a folder, or it cannot be made; before anything takes long."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"nothing can be written to `{there}`; choose another {OUT}")


def refuse_nothing_to_resume(folder: Path) -> None:
    """Raises `RunError` unless a folder holds a run with its journal that is not alive.

    A finished run may be given more updates; `run/recipe_changes.py` refuses it without.
    """
    match standing(folder):
        case "stopped" | "lost" if is_alive(folder):
            raise RunError(
                f"the run in `{folder}` goes on in another process, so there is nothing to resume: wait for it, or "
                f"stop it first; `{command('pool', folder, '--list')}` says what its instances do"
            )
        case "stopped" | "finished":
            return
        case "lost":
            refuse_lost(folder)
        case "empty":
            raise RunError(f"`{folder}` holds no run, so there is nothing to resume; to start one, leave {RESUME} out")
        case "foreign":
            raise RunError(
                f"`{folder}` holds no run, so there is nothing to resume; name the folder of one, or choose another "
                f"{OUT} and leave {RESUME} out to start one"
            )


def refuse_lost(folder: Path) -> None:
    """Raises `RunError` if the journal of a run is gone, or has less than the run had recorded.

    To begin there again, or to continue from less, would leave two histories in one folder.
    """
    recorded = recorded_in(folder)
    if recorded.lost is None:
        return
    lines = [
        f"the journal of the run in `{folder}` has lost what it had recorded:",
        recorded.lost,
        f"{RESTORE}, or start a new run with another {OUT}",
    ]
    if recorded.begun:
        lines.append("to go on from what it has, move `checkpoints`, `versions` and `metrics.jsonl` out of the folder")
    raise RunError("\n  ".join([*lines, "nothing was changed"]))


class DrawnRows(NamedTuple):
    """The rows of a task."""

    num: int  # that are drawn, which is one epoch
    dropped: int = 0  # beside them: they are too long, are never drawn, and count in row numbers
    prompt_limit: int = 0  # tokens, beyond which prompts are dropped or cut; 0: none is


NO_ROWS = DrawnRows(0)


def facts_of(
    recipe: Recipe,
    *,
    rows: Mapping[str | None, DrawnRows],
    templated: bool,
    vocabulary: int,
) -> RunFacts:
    """Returns the facts that the journal records of a run: from its recipe, its data and its model.

    `rows` are those of each task, by its label.
    """
    plan = recipe.plan
    found = [(task.label, rows.get(task.label, NO_ROWS), task.order) for task in recipe.tasks]
    labelled = [(label, each, order) for label, each, order in found if label is not None]
    only = NO_ROWS if isinstance(recipe.task, tuple) else found[0][1]
    return RunFacts(
        paradigm=plan.paradigm.name,
        staleness=plan.staleness,
        auto=plan.auto,
        batch=plan.batch,
        group=plan.group_size,
        updates=plan.updates,
        seed=recipe.seed,
        data_rows=sum(each.num for each in rows.values()),
        retries=plan.retries,
        filter_limit=plan.filter_limit,
        order="mixed" if isinstance(recipe.task, tuple) else recipe.task.order,
        tasks=tuple((label, each.num, order, each.dropped, each.prompt_limit) for label, each, order in labelled),
        replay_groups=plan.replay_groups,
        replay_uses=plan.replay_uses,
        templated=templated,
        vocabulary=vocabulary,
        laws_broken=plan.paradigm.breaks,
        reserve_groups=plan.reserve_groups,
        reserve_members=plan.reserve_members,
        dropped_rows=only.dropped,
        prompt_limit=only.prompt_limit,
        engine=recipe.engine.type,
    )
