"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from stretto.errors import RecipeError, shortened


def path(text: str) -> Path:
    """Returns a typed path with `~` expanded: shells leave the `~` of `--out=~/run` as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def recipe(text: str) -> Path:
    """Returns the file of a recipe that was typed as a path or as the name of a shipped recipe."""
    from stretto.recipe.shipped_recipes import found

    with contextlib.suppress(OSError):  # of a folder that may not be entered, which is reported later
        return found(path(text))
    return path(text)


def integer(text: str) -> int:
    """Returns a typed whole number. It has the bound of the integers of a recipe, so that every journal can hold it."""
    from stretto.options import MAX_INTEGER  # not before: `--help` answers at once

    try:
        value = int(text)
    except ValueError as error:
        if not text.strip().lstrip("+-").isdecimal():  # otherwise Python refuses to convert so many digits
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
        value = MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too large: give at most {MAX_INTEGER}")
    return value


def add_recipe(parser: argparse.ArgumentParser, *, optional: str | None = None) -> None:
    """Declares `RECIPE` and `--set KEY=VALUE`. With `optional`, which says when, `RECIPE` may be left out."""
    help = "a TOML file, or the name of a recipe that comes with the package, such as `quickstart`"
    if optional is None:
        parser.add_argument("recipe", type=recipe, metavar="RECIPE", help=help)
    else:
        parser.add_argument("recipe", type=recipe, nargs="?", metavar="RECIPE", help=f"{help}; {optional}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the recipe; `KEY=` removes it",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares `RUN`."""
    parser.add_argument("run", type=path, metavar="RUN", help="a run folder")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Declares one or more `RUN`."""
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN", help="a run folder")


def add_file(parser: argparse.ArgumentParser, name: str) -> None:
    """Declares `-o FILE`, by default `name`, and `--force`."""
    parser.add_argument("-o", "--out", type=path, default=Path(name), metavar="FILE", help=f"(default: {name})")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Declares `--tokenizer`."""
    parser.add_argument(
        "--tokenizer",
        type=path,
        metavar="FOLDER",
        help="folder with the `tokenizer.json` of the runs (default: that of the run's policy or model)",
    )


LEVELS = ("debug", "info", "warning", "error")  # of the log, from the most lines to the fewest


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Declares `-v`, `-q` and `--log-level`, which set `log_level` and `quiet`."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "-v", "--verbose", action="count", default=0, help="print more of what happens; twice: everything"
    )
    chosen.add_argument("-q", "--quiet", action="store_true", help="print errors and results alone, no progress")
    chosen.add_argument("--log-level", choices=LEVELS, help="least important log lines to print (default: warning)")


def log_level(options: argparse.Namespace) -> str:
    """Returns the level that `-v`, `-q` and `--log-level` ask for."""
    if options.log_level is not None:
        return str(options.log_level)
    return "error" if options.quiet else ("warning", "info", "debug")[min(options.verbose, 2)]


def verbosity(options: argparse.Namespace) -> list[str]:
    """Returns the same arguments for another command."""
    return ["--quiet"] if options.quiet else ["--log-level", log_level(options)]


def refuse_missing_recipe(recipe: Path) -> None:
    """Raises `RecipeError` if there is no such file."""
    with contextlib.suppress(OSError):  # `load_recipe` reports a folder that may not be entered
        if not recipe.exists():
            from stretto.recipe.shipped_recipes import missing

            raise RecipeError(missing(recipe))
