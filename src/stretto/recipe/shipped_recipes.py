"""The recipes that come with the package, by name: `stretto train quickstart` works from any folder.

They are the files of `recipes/` in the repository. Some need data or code of the repository, and say so elsewhere.
Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import itertools
import os
from glob import glob
from pathlib import Path

from stretto.environments.given import is_given
from stretto.errors import RecipeError

FOLDER = Path(__file__).parent / "shipped"  # a link to `recipes/` in the repository, a folder of files in a wheel


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
    """Returns a sentence for a recipe that does not exist, with the shipped one that was perhaps meant."""
    near = difflib.get_close_matches(recipe.stem, names(), n=1, cutoff=0.6)
    hint = f"; `{near[0]}` is one that comes with the package" if near else ""
    return f"recipe `{recipe}` does not exist{hint}"


def refuse_missing_files(recipe: object, *tasks: object) -> None:
    """Raises `RecipeError` if a shipped recipe names a data file of the repository that is not below this folder.

    Rows that were given from Python are no files.
    """
    if not isinstance(recipe, str | Path) or found(Path(recipe)).resolve().parent != FOLDER.resolve():
        return
    name = found(Path(recipe)).stem
    for task, key in itertools.product(tasks, ("path", "evaluation_path")):
        value = getattr(task, key, None)
        for file in value if isinstance(value, tuple) else (value,):
            if (
                not isinstance(file, str | Path)
                or is_given(file)
                or Path(file).is_absolute()
                or Path(file).exists()
                or glob(str(file))
            ):
                continue
            raise RecipeError(
                f"the recipe `{name}` needs `{file}` (`task.{key}`), which is not in this folder: it is for a checkout "
                f"of the repository of stretto, and `recipes/{name}.toml` there says how to get its files; go there, "
                f"or name a file of yours with `--set task.{key}=FILE`"
            )
