"""`stretto train RECIPE`: trains a policy. `stretto train --out RUN --resume` continues a run by its own recipe."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli import arguments
from stretto.errors import RunError

if TYPE_CHECKING:
    from stretto.api.runs import Run

HELP = "train a policy by a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe(parser, optional="with --resume it may be left out: the run has its own")
    parser.add_argument("--out", type=arguments.path, metavar="RUN", help="run folder (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out after it was stopped or killed, or extend it"
    )
    parser.add_argument(
        "--give-up",
        type=arguments.integer,
        action="append",
        default=[],
        metavar="ID",
        help="with --resume: fail a trajectory that an update cannot be trained on",
    )
    parser.add_argument("--part-of-compare", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        raise RunError(f"`--resume` needs `--out RUN`: the folder of the run to continue{_newest_hint(options)}")
    if options.give_up and not options.resume:
        raise RunError("`--give-up ID` needs `--resume`: a run that begins has no trajectory to give up")
    if options.recipe is not None:
        arguments.refuse_missing_recipe(options.recipe)
    elif not options.resume:
        raise RunError("`stretto train` needs a RECIPE: name one, or continue a run with `--out RUN --resume`")

    from stretto.api.training import train
    from stretto.run.folder_checks import default_run_folder, standing
    from stretto.run.interrupts import ignore_interrupts

    folder = options.out or default_run_folder(options.recipe)
    try:
        made = train(
            options.recipe,
            options.overrides,
            out=folder,
            resume=options.resume,
            give_up=options.give_up,
            progress=not options.quiet,
        )
    except KeyboardInterrupt:
        if standing(folder) == "empty" or options.part_of_compare:
            raise
        _say(f"interrupted; continue with {_resume_hint(folder)}")
        return 130
    ignore_interrupts()
    if options.quiet:
        return 130 if made.stopped else 0
    return _close(made, part_of_compare=options.part_of_compare)


def _close(run: Run, *, part_of_compare: bool) -> int:
    """Prints the result of a run. Returns the exit status: 130 if the run was stopped.

    `part_of_compare` leaves out the suggestions of what to type next: `compare` prints its own.
    """
    from stretto.observe.console import make_console
    from stretto.observe.summary import summary_table
    from stretto.run.command_hint import command

    summary, steps, folder = run.summary, run.recipe.training.steps, run.folder
    if run.stopped:
        hint = "" if part_of_compare else f"; continue with {_resume_hint(folder)}"
        _say(f"stopped after {summary['steps']} of {steps} updates{hint}")
        return 130
    make_console().print(summary_table(summary))
    if not part_of_compare:
        _say(f"try next: {command('view', folder)}")
        _say(f"try next: {command('verify', folder)}")
        _say(f"try next: {command('show', folder, '--update', str(steps - 1))}")
    _say(f"the trained policy is in {folder / 'policy'}")
    return 0


def _say(text: str) -> None:
    from stretto.observe.console import make_console

    make_console().print(text, highlight=False, markup=False, soft_wrap=True)


def _newest_hint(options: argparse.Namespace) -> str:
    """Returns the command that continues the newest run in `runs`, with the options that were typed; empty if none."""
    from stretto.observe.run_list import runs_below

    if not Path("runs").is_dir():
        return ""
    begun = [each for each in runs_below(Path("runs")) if each.started_at is not None]
    can_go_on = [each for each in begun if each.state in ("stopped", "killed", "failed", "finished")]
    if not can_go_on:
        return ""
    typed = [word for override in options.overrides for word in ("--set", override)]
    own = [] if options.recipe is None else [str(options.recipe)]
    words = ["stretto", "train", *own, "--out", str(can_go_on[-1].folder), "--resume", *typed]
    return f"; the newest that can go on is continued by `{shlex.join(words)}`"


def _resume_hint(folder: Path) -> str:
    """Returns the command that continues a run."""
    from stretto.run.command_hint import command

    return f"`{command('train', '--out', folder, '--resume')}`"
