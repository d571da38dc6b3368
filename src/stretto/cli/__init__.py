"""The command line.

Each command is a file of this package: its help, its arguments, and the call that does the work. Arguments are parsed
before anything heavy is imported, so `--help` answers at once. So do typing mistakes: a recipe that does not exist, an
unknown key, a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO

from stretto import __version__
from stretto.cli import (
    check,
    compare,
    completion,
    doctor,
    export,
    pool,
    replay,
    report,
    runs,
    serve,
    show,
    trace,
    train,
    verify,
    view,
)
from stretto.cli.arguments import add_verbosity, log_level
from stretto.errors import StrettoError, printable

EXAMPLES = """examples:
  stretto check recipes/quickstart.toml
  stretto train recipes/quickstart.toml --set training.steps=20 --out runs/short
  stretto train --out runs/short --resume --set training.steps=40
  stretto compare recipes/quickstart.toml --paradigms synchronous,multi-version
  stretto verify runs/short
  stretto show runs/short --update 10
  stretto list runs
  stretto view runs/short
  stretto report runs/short -o report.html
  stretto trace runs/short -o trace.json
  stretto pool runs/short --add 2
  stretto replay runs/short
  stretto export runs/short --merge -o models/short
  stretto serve runs/short
  stretto doctor
  stretto completion bash
"""

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


class Command(Protocol):
    """One command: a module of this package."""

    HELP: str  # one line

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Carries the command out and returns the exit status."""
        ...


COMMANDS: Mapping[str, Command] = {
    "train": train,
    "check": check,
    "compare": compare,
    "verify": verify,
    "replay": replay,
    "show": show,
    "list": runs,
    "view": view,
    "report": report,
    "trace": trace,
    "pool": pool,
    "export": export,
    "serve": serve,
    "doctor": doctor,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments, runs the command and returns the exit status.

    0: success. 1: a law is broken, or `replay` computed other weights than the run. 2: bad input, or a run that failed.
    130: stopped by Ctrl-C or a signal. 141: the reader of the output is gone. A run that ended with 130, with 141 or
    was killed can be resumed.
    """
    status = _main(arguments)
    if arguments is None and (listeners := sys.modules.get("stretto.observe.listeners")) and listeners.abandoned():
        sys.stderr.flush()
        os._exit(status)  # a tracker that hangs may have left threads and exit handlers that hang too
    return status


def _main(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    _refuse_first_word(parser, sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    from stretto.run.interrupts import handled  # not before: `--help` answers at once

    level, ours = getattr(logging, log_level(options).upper()), logging.getLogger("stretto")
    terminal, level_before = _StandardError(), ours.level
    terminal.setLevel(level)
    logging.basicConfig(level=max(level, logging.WARNING), format=LOG_FORMAT, handlers=[terminal])
    ours.setLevel(min(level, logging.INFO))  # the log of a run has these, whatever the terminal shows
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own: lines would appear twice
    run: Callable[[argparse.Namespace], int] = options.run_command
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with handled({signal.SIGTERM: _interrupt}):  # until a run has handlers of its own
            status = run(options)
            sys.stdout.flush()
            return status
    except StrettoError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {printable(str(error), lines=True)}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        from stretto.observe.console import BROKEN_PIPE, discard_output

        discard_output()
        return BROKEN_PIPE
    except SystemExit:
        raise
    except BaseException:  # a fault of this package or of the user's code; not 1, which `verify` and `replay` use
        traceback.print_exc()
        return 2
    finally:
        ours.setLevel(level_before)
        if arguments is not None and signal.getsignal(signal.SIGINT) is not on_interrupt:
            signal.signal(signal.SIGINT, on_interrupt)  # called by a program that continues after this


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _refuse_first_word(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends with what to type if the first word is no command: argparse names all of them, and none that is near."""
    word = arguments[0] if arguments else ""
    if word.startswith(("-v", "-q", "--verb", "--q", "--log")) and word != "--version":
        parser.error(f"`{word}` is an option of a command and goes behind it, such as `stretto list {word}`")
    if word and not word.startswith("-") and word not in COMMANDS:
        import difflib  # not before: it is seldom needed

        near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command `{word}`; {hint}")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="stretto",
        description="Reinforcement learning for language models: several versions of the policy generate at once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.HELP)
        command.add_arguments(subparser)
        add_verbosity(subparser)
        subparser.set_defaults(run_command=command.run)
    return parser


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which the live display replaces so that log lines appear above it.

    Control characters are escaped: names of files, and texts that a model made, reach the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass
