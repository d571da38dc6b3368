"""`stretto list DIR`: the runs below a folder."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from stretto.cli import arguments

HELP = "list the runs below a folder, one line each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=arguments.path, nargs="?", default=Path("runs"), metavar="DIR", help="a folder (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")


def run(options: argparse.Namespace) -> int:
    from stretto.observe.run_list import as_json, lines_of, runs_below

    runs = runs_below(options.folder)
    if options.json:
        sys.stdout.write(json.dumps(as_json(runs, options.folder), indent=1) + "\n")
    elif not runs:
        sys.stdout.write(f"no run in `{options.folder}` or below it\n")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.write("\n".join(lines_of(runs, options.folder, width)) + "\n")
    return 0
