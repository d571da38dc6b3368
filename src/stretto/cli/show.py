"""`stretto show RUN`: prints a run's updates, or the samples of one update."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from stretto.cli import arguments

WIDEST = 240  # characters of an overview that does not go to a terminal

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
    shown = show(options.run, update=options.update, samples=options.samples, decode=decode)
    console = make_console()
    if options.update is None and not console.is_terminal and "COLUMNS" not in os.environ:
        # A file or a pipe has no width: tables are as wide as they are, except for long texts of notes.
        wide = console.measure(shown, options=console.options.update(max_width=WIDEST)).maximum
        console = make_console(width=max(console.width, wide))
    console.print(shown)
    return 0
