"""`stretto compare RECIPE`: one recipe under several paradigms."""

from __future__ import annotations

import argparse

from stretto.cli import arguments

HELP = "run the same recipe, seed and number of updates under several paradigms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe(parser)
    parser.add_argument("--paradigms", metavar="A,B,...", help="default: all that the engine serves")
    parser.add_argument(
        "--engines",
        metavar="A,B",
        help="run each paradigm with each of these engines, such as `native,vllm` (default: that of the recipe)",
    )
    parser.add_argument(
        "--out",
        type=arguments.path,
        metavar="DIR",
        help="folder for the runs and compare.json; runs that are finished there are kept",
    )
    parser.add_argument("--target", type=float, metavar="SCORE", help="accuracy for the time-to-accuracy column")


def run(options: argparse.Namespace) -> int:
    arguments.refuse_missing_recipe(options.recipe)

    from stretto.assembly.compare import compare_from_command_line

    return compare_from_command_line(
        options.recipe,
        options.overrides,
        paradigms=None if options.paradigms is None else options.paradigms.split(","),
        engines=None if options.engines is None else options.engines.split(","),
        folder=options.out,
        target=options.target,
        train_options=arguments.verbosity(options),
    )
