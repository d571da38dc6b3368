"""`stretto check RECIPE`: everything that `train` does before it builds a model."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "do everything that train does before it builds a model; print every value and the memory needed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe(parser)
    parser.add_argument(
        "--devices",
        metavar="COUNTxSIZE",
        help="plan for GPUs that need not be here, such as `8x141GiB`; the model's `config.json` is enough",
    )


def run(options: argparse.Namespace) -> int:
    arguments.refuse_missing_recipe(options.recipe)

    from stretto.api.checking import check

    sys.stdout.write(str(check(options.recipe, options.overrides, devices=options.devices)))
    return 0
