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
    from stretto.api.run_files import write_report

    say = _unsaid if options.quiet else _print
    verify = not options.no_verify
    size = write_report(
        options.runs, options.out, verify=verify, tokenizer=options.tokenizer, force=options.force, say=say
    )
    _print(f"{options.out} has {size / 1e6:.1f} MB")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _unsaid(text: str) -> None:
    """Prints nothing: progress under `--quiet`."""
