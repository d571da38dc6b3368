"""`stretto export RUN`: writes the policy of a run for other tools."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "write the policy of a run to a folder, or upload it to the hub; merged into its base if asked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=arguments.path,
        metavar="RUN",
        help="a run folder (of a run that is not finished, the newest version), or a policy folder",
    )
    parser.add_argument("-o", "--out", type=arguments.path, metavar="FOLDER", help="a new folder for the policy")
    parser.add_argument("--merge", action="store_true", help="add the adapter to its base: a whole model")
    parser.add_argument("--push", metavar="NAME", help="upload it to the Hugging Face hub under this name")
    parser.add_argument("--public", action="store_true", help="with --push: a new repository is public, not private")


def run(options: argparse.Namespace) -> int:
    from stretto.api.run_files import export

    export(options.run, options.out, merge=options.merge, push=options.push, public=options.public, say=_print)
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
