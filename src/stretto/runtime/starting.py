"""Which folder a run may begin in or go on in. Imports nothing heavy, so that a refusal comes at once.

```
what is in the folder       begin        `--resume`
nothing, or no folder       yes          no: nothing to resume
a finished run              no           no: nothing to resume
a run, however it ended     no           yes, if the recipe is the same but for `[runtime]`
a run that goes on          no           no: another process runs it
anything else               no           no
```
"""

from __future__ import annotations

import copy
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto.errors import RecipeError, RunError
from stretto.invocation import command
from stretto.store.lock import is_alive

if TYPE_CHECKING:
    from stretto.config import Recipe

Standing = Literal["empty", "finished", "stopped", "foreign"]
"""What a folder holds: nothing, a run that is finished, one that was stopped or killed, or something else."""


def default_run_folder(recipe: Path) -> Path:
    """Where a run goes when nobody says."""
    return Path("runs") / f"{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def standing(folder: Path) -> Standing:
    """Look into a folder; nothing in it is changed."""
    made_first = (".partial", ".lock")
    if not folder.exists() or (folder.is_dir() and all(path.suffix in made_first for path in folder.iterdir())):
        return "empty"  # or a run was killed as it made the folder
    if not (folder / "config.toml").is_file():
        return "foreign"
    if _finished(folder):
        return "finished"
    return "stopped"


def _finished(folder: Path) -> bool:
    from stretto.store.schema import JOURNAL_NAME, is_empty

    if not (folder / JOURNAL_NAME).is_file() or is_empty(folder / JOURNAL_NAME):
        return False
    from stretto.store.reader import JournalReader

    with JournalReader(folder) as reader:
        return any(session.outcome == "finished" for session in reader.sessions())


def refuse_occupied(folder: Path) -> None:
    """A run begins in a folder of its own, which it can write to."""
    match standing(folder):
        case "empty":
            refuse_unwritable(folder)
            return
        case "stopped" if is_alive(folder):
            hint = ", and a process runs the run in it; choose another `--out`"
        case "stopped":
            hint = "; add `--resume` to continue the run in it, or choose another `--out`"
        case _:
            hint = "; choose another `--out`"
    raise RunError(f"`{folder}` exists already{hint}")


def refuse_unwritable(folder: Path) -> None:
    """Before anything takes long: what is to be written there, or to a folder that is still to be made, can be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"nothing can be written to `{there}`; choose another `--out`")


def refuse_nothing_to_resume(folder: Path) -> None:
    """Only a run that is not finished, and that nobody runs, goes on."""
    match standing(folder):
        case "stopped" if is_alive(folder):
            raise RunError(
                f"the run in `{folder}` goes on in another process, so there is nothing to resume: wait for it, or "
                f"stop it first; `{command('pool', folder, '--list')}` says what its instances do"
            )
        case "stopped":
            return
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


def refuse_another_recipe(recipe: Recipe, folder: Path, instead: str | None = None) -> None:
    """A run goes on as it began; only how it is run (its threads and deadlines) may change.

    `instead` is what the error says to do, where that is not to resume it by its own recipe.
    """
    try:
        before = _flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # of TOML and of UTF-8 too
        raise RunError(
            f"`{folder / 'config.toml'}`, the recipe that the run was started with, cannot be read: {error}; put it "
            "back as it was, or start a new run"
        ) from error
    now = _flat(tomllib.loads(recipe.dumps()))
    if now.get("model.dtype") == "auto":  # stays what it came to where the run began
        now["model.dtype"] = before.get("model.dtype")
    changed = [
        key
        for key in sorted(before.keys() | now.keys())
        if not key.startswith("runtime.") and before.get(key) != now.get(key)
    ]
    if changed:
        lines = [
            f"`{key}` is {_value(now, key)}, and the run in `{folder}` was started "
            + (f"with {before[key]!r}" if key in before else "without it")
            for key in _causes(recipe, before, changed)
        ]
        own = f"go on with the recipe that it was started with (`{folder / 'config.toml'}`), or start a new run"
        raise RunError("\n  ".join(["this is another recipe:", *lines, instead or own]))


def _causes(recipe: Recipe, before: Mapping[str, Any], changed: Sequence[str]) -> list[str]:
    """Those of the keys that differ which do not only follow from others, such as a default under another paradigm."""
    from stretto.config import idle, parse_recipe

    written = tomllib.loads(recipe.source_toml())
    by_hand = _flat(written)
    own = [key for key in changed if key in by_hand]
    as_before = _with(written, {key: before.get(key) for key in own})
    try:
        undone = _flat(tomllib.loads(parse_recipe(as_before).dumps()))
    except RecipeError:  # no recipe without the others: then all of them are told
        return list(changed)

    def follows(key: str) -> bool:
        if undone.get(key) == before.get(key):
            return True
        return key in before and tuple(key.split(".")) in idle(_with(written, {key: before[key]}))

    return [key for key in changed if key in own or not follows(key)] or list(changed)


def _with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with other values; None takes one out."""
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
