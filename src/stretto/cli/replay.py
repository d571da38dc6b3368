"""`stretto replay RUN`: trains a run again from its journal."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "train a run again from its journal; compare every version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    parser.add_argument("--until", type=arguments.integer, metavar="N", help="stop at version N (default: the last)")
    parser.add_argument("--out", type=arguments.path, metavar="FOLDER", help="write the resulting policy there")


def run(options: argparse.Namespace) -> int:
    from stretto.api.runs import Run

    result = Run(options.run).replay(options.until, out=options.out, say=_print)
    _print(str(result))
    return 0 if result.difference is None else 1


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
