"""The recipes that come with the package, by name: `stretto train quickstart` works from any folder.

They are the files of `recipes/` in the repository. Some need data or code of the repository, and say so elsewhere.
Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import itertools
import os
import tomllib
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from stretto.environments.given import is_given
from stretto.errors import RecipeError

FOLDER = Path(__file__).parent / "shipped"  # a link to `recipes/` in the repository, a folder of files in a wheel
KEYS = ("path", "evaluation_path")  # of a task, which name files
MADE_BY = {  # folders of data, with the command that makes them in a checkout
    "data/gsm8k": '`make gsm8k` makes it (`make gsm8k FROM="--from FOLDER"` without a hub)',
    "data/bfcl": "`python -m stretto.environments.adapters.bfcl --out data/bfcl` makes it",
}


def names() -> list[str]:
    """Returns the names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def found(recipe: Path) -> Path:
    """Returns the file of a recipe: the one at this path, or else the shipped one of this name.

    A name has neither a folder nor a suffix. A path that is neither is returned as it is.
    """
    if os.sep in str(recipe) or recipe.suffix or recipe.is_file():
        return recipe
    shipped = FOLDER / f"{recipe}.toml"
    return shipped if shipped.is_file() else recipe


def missing(recipe: Path) -> str:
    """Returns a sentence for a recipe that does not exist, with the shipped one that was perhaps meant.

    A name alone, which can only be that of a shipped recipe, gets all of them.
    """
    near = difflib.get_close_matches(recipe.stem, names(), n=1, cutoff=0.6)
    hint = f"; `{near[0]}` is one that comes with the package" if near else ""
    if not near and recipe.name == str(recipe) and not recipe.suffix:
        hint = f"; those that come with the package are {', '.join(f'`{name}`' for name in names())}"
    return f"recipe `{recipe}` does not exist{hint}"


def refuse_missing_files(recipe: object, *tasks: object) -> None:
    """Raises `RecipeError` if a shipped recipe names a data file that is not below this folder.

    The message says how to get a file that the recipe itself names. One that an override names is only missing. Rows
    that were given from Python are no files.
    """
    if not isinstance(recipe, str | Path) or found(Path(recipe)).resolve().parent != FOLDER.resolve():
        return
    path = found(Path(recipe))
    own = set(_named_files(*_tables(path)))
    for key, file in _named_files(*map(_paths, tasks)):
        if is_given(file) or file.startswith(("/", "~")) or Path(file).exists() or glob(file):
            continue
        if (key, file) not in own:
            raise RecipeError(f"`task.{key} = {file!r}`: there is no such file (seen from {Path.cwd()})")
        raise RecipeError(
            f"the recipe `{path.stem}` needs `{file}` (`task.{key}`), which is not in this folder: "
            f"{_way_to(file, path.stem)}, or name a file of yours with `--set task.{key}=FILE`"
        )


def _tables(path: Path) -> list[dict[str, Any]]:
    """Returns the tables of the tasks of a recipe, as they are written."""
    written = tomllib.loads(path.read_text(encoding="utf-8")).get("task", {})
    return written if isinstance(written, list) else [written]


def _paths(task: object) -> dict[str, Any]:
    return {key: getattr(task, key, None) for key in KEYS}


def _named_files(*tables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the files that tasks name, each with its key."""
    for table, key in itertools.product(tables, KEYS):
        value = table.get(key)
        for file in value if isinstance(value, list | tuple) else (value,):
            if isinstance(file, str | Path):
                yield key, str(file)


def _way_to(file: str, name: str) -> str:
    """Returns how to get a file of the repository, seen from this folder."""
    if not (Path("recipes", f"{name}.toml").is_file() and Path("Makefile").is_file()):
        return (
            "it is for a checkout of the repository of stretto, and "
            f"`recipes/{name}.toml` there says how to get its files; go there"
        )
    return MADE_BY.get(str(Path(file).parent), f"`recipes/{name}.toml` says how to get its files")
