"""`stretto doctor`: what this machine and this installation can do."""

from __future__ import annotations

import argparse
import json
import sys

HELP = "say what this machine and this installation can do, and what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    from stretto.assembly.doctor import as_json, examine, exit_status, lines_of

    findings = examine()
    if options.json:
        sys.stdout.write(json.dumps(as_json(findings), indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(findings))
    return exit_status(findings)
