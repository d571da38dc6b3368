"""`stretto trace RUN -o FILE`: writes the timeline of a run for Perfetto or `chrome://tracing`."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

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
    from stretto.api.run_files import write_trace

    count = write_trace(options.run, options.out, trajectories=options.trajectories, force=options.force)
    sys.stdout.write(f"{options.out} has {count:,} events; open it at https://ui.perfetto.dev or chrome://tracing\n")
    return 0
