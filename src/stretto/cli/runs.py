"""`stretto list DIR`: the runs below a folder."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stretto.cli import arguments

HELP = "list the runs below a folder, one line each"
WIDE = 250  # columns of the table where no terminal says how many there are: a run is one line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=arguments.path, nargs="?", default=Path("runs"), metavar="DIR", help="a folder (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")


def run(options: argparse.Namespace) -> int:
    from stretto.observe.console import make_console
    from stretto.observe.run_list import as_json, runs_below, runs_table

    runs = runs_below(options.folder)
    if options.json:
        sys.stdout.write(json.dumps(as_json(runs, options.folder), indent=1) + "\n")
    elif not runs:
        sys.stdout.write(f"no run in `{options.folder}` or below it\n")
    else:
        make_console(None if sys.stdout.isatty() else WIDE).print(runs_table(runs, options.folder))
    return 0
