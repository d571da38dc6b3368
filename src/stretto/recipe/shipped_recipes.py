"""The recipes that come with the package, by name: `stretto train quickstart` works from any folder.

They are the files of `recipes/` in the repository. Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

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
