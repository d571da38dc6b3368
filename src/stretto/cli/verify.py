"""`stretto verify RUN`: proves the three laws, and what was trained on, from a journal."""

from __future__ import annotations

import argparse
import sys

from stretto.cli import arguments

HELP = "prove the three laws and what was trained on from a run's journal alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)


def run(options: argparse.Namespace) -> int:
    from stretto.store.verify import conclusion, exit_code, format_findings, verify

    findings = verify(options.run)
    sys.stdout.write(f"{format_findings(findings)}\n{conclusion(findings)}\n")
    return exit_code(findings)
