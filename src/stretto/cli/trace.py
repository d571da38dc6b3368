"""`stretto trace RUN -o FILE`: writes the timeline of a run for Perfetto or `chrome://tracing`."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments
from stretto.errors import RunError

HELP = "write the timeline of a run for Perfetto or chrome://tracing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    arguments.add_file(parser, "trace.json")
    parser.add_argument(
        "--trajectories",
        type=arguments.integer,
        default=20_000,
        metavar="N",
        help="most trajectories with spans of their own (default: 20000)",
    )


def run(options: argparse.Namespace) -> int:
    if options.trajectories < 0:
        raise RunError(f"`--trajectories {options.trajectories}` is no number of trajectories: give 0 or more")
    arguments.refuse_existing_file(options)
    from stretto.view.runs import RunSource
    from stretto.view.trace import write_trace

    count = write_trace(RunSource(options.run), options.out, options.trajectories)
    sys.stdout.write(f"{options.out} has {count:,} events; open it at https://ui.perfetto.dev or chrome://tracing\n")
    return 0
