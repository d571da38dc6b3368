"""`stretto check RECIPE`: everything that `train` does before it builds a model."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "do everything that train does before it builds a model; print every value and the memory needed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe(parser)


def run(options: argparse.Namespace) -> int:
    arguments.refuse_missing_recipe(options.recipe)

    from stretto.recipe.schema import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)

    from stretto.assembly.check import check

    sys.stdout.write(check(recipe))
    return 0
