"""`stretto train RECIPE`: trains a policy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli import arguments
from stretto.errors import RunError

if TYPE_CHECKING:
    from stretto.recipe.schema import Recipe

HELP = "train a policy by a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe(parser)
    parser.add_argument("--out", type=arguments.path, metavar="RUN", help="run folder (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out after it was stopped or killed, or extend it"
    )
    parser.add_argument(
        "--give-up",
        type=arguments.integer,
        action="append",
        default=[],
        metavar="ID",
        help="with --resume: fail a trajectory that an update cannot be trained on",
    )
    parser.add_argument("--part-of-compare", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        raise RunError("`--resume` needs `--out RUN`: the folder of the run to continue")
    if options.give_up and not options.resume:
        raise RunError("`--give-up ID` needs `--resume`: a run that begins has no trajectory to give up")
    recipe, folder = _recipe_and_folder(options)

    from stretto.assembly.train import train_from_command_line

    return train_from_command_line(
        recipe,
        folder,
        resume=options.resume,
        part_of_compare=options.part_of_compare,
        give_up=options.give_up,
    )


def _recipe_and_folder(options: argparse.Namespace) -> tuple[Recipe, Path]:
    """Checks both before torch is imported, which takes seconds."""
    from stretto.run.folder_checks import default_run_folder, refuse_nothing_to_resume, refuse_occupied

    arguments.refuse_missing_recipe(options.recipe)
    folder = options.out or default_run_folder(options.recipe)
    if options.resume:
        refuse_nothing_to_resume(folder)
    else:
        refuse_occupied(folder)

    from stretto.recipe.schema import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    if options.resume:
        from stretto.run.recipe_changes import accepted_changes

        accepted_changes(recipe, folder)
    return recipe, folder
