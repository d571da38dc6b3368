"""`stretto report RUN ... -o FILE`: writes the page of `stretto view` with its data into one file."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "write what `view` shows into one HTML file, with a sample of the trajectories"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_runs(parser)
    arguments.add_file(parser, "report.html")
    parser.add_argument("--no-verify", action="store_true", help="leave out the findings of `verify`")
    arguments.add_tokenizer(parser)


def run(options: argparse.Namespace) -> int:
    arguments.refuse_existing_file(options)
    tokenizer = arguments.tokenizer_file(options.tokenizer)
    from stretto.view.report import write_report
    from stretto.view.runs import open_runs

    runs = open_runs(options.runs)
    say = _unsaid if options.quiet else _print
    size = write_report(runs, options.out, verified=not options.no_verify, tokenizer=tokenizer, say=say)
    _print(f"{options.out} has {size / 1e6:.1f} MB")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _unsaid(text: str) -> None:
    """Prints nothing: progress under `--quiet`."""
