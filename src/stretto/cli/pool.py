"""`stretto pool RUN`: lists, adds and removes the rollout instances of a live run."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments
from stretto.errors import RunError

MOST = 64  # instances in one request, which cannot be taken back

HELP = "list, add and remove the rollout instances of a run while it is running"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    request = parser.add_mutually_exclusive_group(required=True)
    request.add_argument("--list", action="store_true", help="show what every instance is doing")
    request.add_argument("--add", type=arguments.integer, metavar="N", help="start N more instances")
    request.add_argument(
        "--remove", type=arguments.integer, metavar="ID", help="end an instance once its trajectories have moved"
    )


def run(options: argparse.Namespace) -> int:
    from stretto.run.pool_requests import ask, describe

    if options.add is not None and options.add < 1:
        raise RunError(f"`--add {options.add}` adds nothing; use at least 1")
    if options.add is not None and options.add > MOST:
        raise RunError(f"`--add {options.add}` is more than {MOST} at once; add fewer, and look at `--list` in between")
    if options.list:
        request: dict[str, object] = {"do": "list"}
    elif options.add is not None:
        request = {"do": "add", "count": options.add}
    else:
        request = {"do": "remove", "instance": options.remove}
    sys.stdout.write(describe(ask(options.run, request)))
    return 0
