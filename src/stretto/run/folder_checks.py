"""The folder of a run: whether a run may begin in it, or be resumed. Imports nothing heavy, to refuse at once.

```
what is in the folder       begin        `--resume`
nothing, or no folder       yes          no: nothing to resume
a finished run              no           no: nothing to resume
a run, however it ended     no           yes, if the recipe is the same but for `[runtime]` and `MAY_CHANGE`
a run without its journal   no           no: what it had recorded is gone (`store/traces.py`)
a run that is alive         no           no: another process runs it
anything else               no           no
```
"""

from __future__ import annotations

import copy
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto.errors import RecipeError, RunError
from stretto.run.command_hint import command
from stretto.store.lock import is_alive
from stretto.store.schema import JOURNAL_NAME, RESTORE, RunFacts
from stretto.store.traces import recorded_in

if TYPE_CHECKING:
    from stretto.recipe.schema import Recipe

# Beside `[runtime]`, of a run that goes on. The size of its micro-batches is recorded with each update.
MAY_CHANGE = (
    "rollout.spread",
    "task.pass_env",
    "task.workers",
    "task.worker_gib",
    "task.worker_episodes",
    "training.micro_tokens",
)
# Keys whose `auto` a run replaces by its meaning on the machine where it begins, and keeps unless the recipe says else.
RESOLVED_KEYS = ("model.dtype", "training.micro_tokens")

Standing = Literal["empty", "finished", "stopped", "lost", "foreign"]
"""The contents of a folder: nothing, a run that is finished, one that was stopped or killed, one whose journal is gone
or has less than it had, or something else."""


def default_run_folder(recipe: Path) -> Path:
    """The run folder if the user names none."""
    return Path("runs") / f"{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


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
            hint = ", and a process is starting a run in it; choose another `--out`"
        case "empty":
            refuse_unwritable(folder)
            return
        case "stopped" | "lost" if is_alive(folder):
            hint = ", and a process runs the run in it; choose another `--out`"
        case "stopped":
            hint = "; add `--resume` to continue the run in it, or choose another `--out`"
        case _:
            hint = "; choose another `--out`"
    raise RunError(f"`{folder}` exists already{hint}")


def refuse_unwritable(folder: Path) -> None:
    """Raises `RunError` if nothing can be written to a folder, or it cannot be made; before anything takes long."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"nothing can be written to `{there}`; choose another `--out`")


def refuse_nothing_to_resume(folder: Path) -> None:
    """Raises `RunError` unless a folder holds a run with its journal that is neither finished nor alive."""
    match standing(folder):
        case "stopped" | "lost" if is_alive(folder):
            raise RunError(
                f"the run in `{folder}` goes on in another process, so there is nothing to resume: wait for it, or "
                f"stop it first; `{command('pool', folder, '--list')}` says what its instances do"
            )
        case "stopped":
            return
        case "lost":
            refuse_lost(folder)
        case "finished":
            raise RunError(
                f"the run in `{folder}` is finished, so there is nothing to resume; see `{command('show', folder)}`"
            )
        case "empty":
            raise RunError(f"`{folder}` holds no run, so there is nothing to resume; leave `--resume` out to start one")
        case "foreign":
            raise RunError(
                f"`{folder}` holds no run, so there is nothing to resume; name the folder of one, or choose another "
                "`--out` and leave `--resume` out to start one"
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
        f"{RESTORE}, or start a new run with another `--out`",
    ]
    if recorded.begun:
        lines.append("to go on from what it has, move `checkpoints`, `versions` and `metrics.jsonl` out of the folder")
    raise RunError("\n  ".join([*lines, "nothing was changed"]))


def refuse_another_recipe(recipe: Recipe, folder: Path, instead: str | None = None) -> None:
    """Raises `RunError` if a run would be resumed by another recipe; only `[runtime]` and `MAY_CHANGE` may change.

    Neither `config.toml` nor the journal may be of another run. `instead` is what the error tells the user to do, if
    not to resume it by its own recipe.
    """
    try:
        before = _flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # of TOML and of UTF-8 too
        raise RunError(
            f"`{folder / 'config.toml'}`, the recipe that the run was started with, cannot be read: {error}; put it "
            "back as it was, or start a new run"
        ) from error
    now = _flat(tomllib.loads(recipe.dumps()))
    for key in RESOLVED_KEYS:
        if "auto" in (now.get(key), before.get(key)):
            now[key] = before[key] = None
    for key in now.keys() - before.keys():
        if _is_default(recipe, key):  # the run began before there was such a key
            before[key] = now[key]
    changed = [
        key
        for key in sorted(before.keys() | now.keys())
        if not key.startswith("runtime.") and key not in MAY_CHANGE and before.get(key) != now.get(key)
    ]
    if changed:
        lines = [
            f"`{key}` is {_value(now, key)}, and the run in `{folder}` was started "
            + (f"with {before[key]!r}" if key in before else "without it")
            for key in _causes(recipe, before, changed)
        ]
        own = f"go on with the recipe that it was started with (`{folder / 'config.toml'}`), or start a new run"
        raise RunError("\n  ".join(["this is another recipe:", *lines, instead or own]))
    _refuse_another_journal(recipe, folder)


def facts_of(recipe: Recipe, *, data_rows: int, templated: bool, vocabulary: int) -> RunFacts:
    """Returns the facts that the journal records of a run: from its recipe, its data and its model."""
    plan = recipe.plan
    return RunFacts(
        paradigm=plan.paradigm.name,
        staleness=plan.staleness,
        auto=plan.auto,
        batch=plan.batch,
        group=plan.group_size,
        updates=plan.updates,
        seed=recipe.seed,
        data_rows=data_rows,
        retries=plan.retries,
        filter_limit=plan.filter_limit,
        order=recipe.task.order,
        replay_groups=plan.replay_groups,
        replay_uses=plan.replay_uses,
        templated=templated,
        vocabulary=vocabulary,
        laws_broken=plan.paradigm.breaks,
        reserve_groups=plan.reserve_groups,
        reserve_members=plan.reserve_members,
    )


def _is_default(recipe: Recipe, key: str) -> bool:
    """True if a key of a section has its default value."""
    section, _, name = key.partition(".")
    options = getattr(recipe, section, None)
    field = getattr(type(options), "model_fields", {}).get(name)
    return field is not None and bool(field.default == getattr(options, name))


def _refuse_another_journal(recipe: Recipe, folder: Path) -> None:
    """Raises `RunError` if the journal in a run's folder is not that of its recipe, which `config.toml` is too."""
    if not recorded_in(folder).begun:
        return
    from stretto.store.reader import JournalReader

    with JournalReader(folder) as reader:
        found = reader.facts()
    wanted = facts_of(recipe, data_rows=found.data_rows, templated=found.templated, vocabulary=found.vocabulary)
    names = [each.name for each in fields(RunFacts) if getattr(found, each.name) != getattr(wanted, each.name)]
    if names:
        lines = [f"`{name}` is {getattr(found, name)!r} in it, and {getattr(wanted, name)!r} here" for name in names]
        first = f"`{folder / JOURNAL_NAME}` is the journal of another run than `{folder / 'config.toml'}`:"
        last = f"{RESTORE}, or start a new run with another `--out`; nothing was changed"
        raise RunError("\n  ".join([first, *lines, last]))


def _causes(recipe: Recipe, before: Mapping[str, Any], changed: Sequence[str]) -> list[str]:
    """Returns the keys that differ by themselves, without those that follow from others, such as a default."""
    from stretto.recipe.schema import ineffective_in, parse_recipe

    written = tomllib.loads(recipe.source_toml())
    by_hand = _flat(written)
    own = [key for key in changed if key in by_hand]
    as_before = _with(written, {key: before.get(key) for key in own})
    try:
        undone = _flat(tomllib.loads(parse_recipe(as_before).dumps()))
    except RecipeError:  # without the others it is not a recipe: then all of them are named
        return list(changed)

    def follows(key: str) -> bool:
        if undone.get(key) == before.get(key):
            return True
        return key in before and tuple(key.split(".")) in ineffective_in(_with(written, {key: before[key]}))

    return [key for key in changed if key in own or not follows(key)] or list(changed)


def _with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables with other values; None removes a key."""
    result = copy.deepcopy(dict(values))
    for key, value in changes.items():
        *path, last = key.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
        table.pop(last, None)
        if value is not None:
            table[last] = value
    return result


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _value(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "left out"
