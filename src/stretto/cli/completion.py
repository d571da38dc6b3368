"""`stretto completion SHELL`: prints a script that completes this command."""

from __future__ import annotations

import argparse
import sys

HELP = "print a script that completes stretto in bash, zsh or fish"
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(stretto completion bash)"')


def run(options: argparse.Namespace) -> int:
    from stretto.cli import completion_scripts, make_parser
    from stretto.cli.completion_tables import command_tables, recipe_keys
    from stretto.recipe.shipped_recipes import names

    write = getattr(completion_scripts, options.shell)
    sys.stdout.write(write(command_tables(make_parser()), recipe_keys(), names()))
    return 0
