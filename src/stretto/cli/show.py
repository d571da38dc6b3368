"""`stretto show RUN`: prints a run's updates, or the samples of one update."""

from __future__ import annotations

import argparse
from pathlib import Path

from stretto.cli import arguments

HELP = "read a run: its updates, or the samples of one update"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    parser.add_argument("--update", type=arguments.integer, metavar="N", help="show the samples of update N")
    parser.add_argument("--samples", type=arguments.integer, metavar="M", help="number of samples to show (default: 8)")


def run(options: argparse.Namespace) -> int:
    from stretto.observe.console import make_console
    from stretto.observe.show import show
    from stretto.view.pieces import decoder_of_run

    decode = None if options.update is None else decoder_of_run(Path(options.run))
    make_console().print(show(options.run, update=options.update, samples=options.samples, decode=decode))
    return 0
