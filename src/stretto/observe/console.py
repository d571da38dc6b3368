"""The console that commands print to. If its reader is gone, the command ends as one that the signal SIGPIPE ended."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from rich.console import Console

BROKEN_PIPE = 141  # the exit status that shells give to a process ended by SIGPIPE


def make_console(width: int | None = None) -> Console:
    """Returns a console on the standard output.

    A notebook gets plain lines: its output calls itself a terminal, and is none.
    """
    terminal = None if isinstance(sys.stdout, io.TextIOWrapper) else False  # None: ask it
    return _Console(width=width, emoji=False, force_jupyter=False, force_terminal=terminal)


def discard_output() -> None:
    """Sends what is still written to the standard output nowhere: its reader is gone."""
    with contextlib.suppress(OSError, ValueError):  # it may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()
        raise SystemExit(BROKEN_PIPE)
