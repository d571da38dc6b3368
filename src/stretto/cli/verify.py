"""`stretto verify RUN`: proves the three laws, and what was trained on, from a journal."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "prove the three laws and what was trained on from a run's journal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    parser.add_argument(
        "--recompute",
        type=_count,
        metavar="N",
        help="score N trajectories, spread over the run, again under the versions that sampled them",
    )


def run(options: argparse.Namespace) -> int:
    from stretto.api.runs import verify

    findings = verify(options.run)
    _print(str(findings))
    status = 0 if findings.hold else 1
    if options.recompute is None:
        return status
    if status:
        _print("nothing was recomputed: the journal has to agree with itself first")
        return status
    from stretto.assembly.recompute import recompute

    result = recompute(options.run, options.recompute, say=_print)
    _print(str(result))
    return 1 if result.breaks else 0


def _count(text: str) -> int:
    if (count := arguments.integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of trajectories: give 1 or more")
    return count


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
