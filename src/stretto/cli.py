"""The command line. Arguments are parsed before anything heavy is imported, so `--help` answers at once.

So do mistakes in what was typed: a recipe that is not there or no recipe, a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stretto import __version__
from stretto.errors import RecipeError, RunError, StrettoError

if TYPE_CHECKING:
    from stretto.config import Recipe

EXAMPLES = """examples:
  stretto check recipes/quickstart.toml
  stretto train recipes/quickstart.toml --set training.steps=20 --out runs/short
  stretto train recipes/quickstart.toml --set training.steps=20 --out runs/short --resume
  stretto compare recipes/quickstart.toml --paradigms synchronous,multi-version
  stretto verify runs/short
  stretto show runs/short --update 10
  stretto pool runs/short --add 2
  stretto replay runs/short
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, return the exit status.

    0: done. 1: a law is broken, or a run trained again came to other weights. 2: bad input or a failed run. 130:
    stopped, by Ctrl-C or a signal; a run that was stopped, or killed, can be resumed.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[_StandardError()]
    )
    command: Callable[[argparse.Namespace], int] = options.command
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        return command(options)
    except StrettoError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; nothing is left to say to anybody
        return 0
    finally:
        if arguments is not None and signal.getsignal(signal.SIGINT) is not on_interrupt:
            signal.signal(signal.SIGINT, on_interrupt)  # this is not the end of the process


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: the live display puts itself there, and above it go the lines."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto",
        description="Reinforcement learning for language models: several versions of the policy generate at once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy by a recipe")
    _recipe_arguments(train)
    train.add_argument("--out", type=_path, metavar="RUN", help="run folder (default: runs/<recipe>-<time>)")
    train.add_argument("--resume", action="store_true", help="continue the run in --out after it was stopped or killed")
    train.add_argument("--part-of-compare", action="store_true", help=argparse.SUPPRESS)
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check", help="do all that train does before it builds a model; print every value and the memory it needs"
    )
    _recipe_arguments(check)
    check.set_defaults(command=_check)

    compare = commands.add_parser("compare", help="the same recipe, seed and updates under several paradigms")
    _recipe_arguments(compare)
    compare.add_argument("--paradigms", metavar="A,B,...", help="default: all five")
    compare.add_argument(
        "--out", type=_path, metavar="DIR", help="folder for the runs and compare.json; what is finished there is kept"
    )
    compare.add_argument("--target", type=float, metavar="SCORE", help="accuracy for the column of time to accuracy")
    compare.set_defaults(command=_compare)

    verify = commands.add_parser("verify", help="prove the three laws from a run's journal alone")
    verify.add_argument("run", type=_path, metavar="RUN")
    verify.set_defaults(command=_verify)

    replay = commands.add_parser("replay", help="train a run again from its journal; compare every version")
    replay.add_argument("run", type=_path, metavar="RUN")
    replay.add_argument("--until", type=int, metavar="N", help="up to version N (default: the last)")
    replay.add_argument("--out", type=_path, metavar="FOLDER", help="write the policy that it ends with there")
    replay.set_defaults(command=_replay)

    show = commands.add_parser("show", help="read a run: its updates, or the samples of one")
    show.add_argument("run", type=_path, metavar="RUN")
    show.add_argument("--update", type=int, metavar="N", help="show the samples of update N")
    show.add_argument("--samples", type=int, metavar="M", help="how many samples of that update (default: 8)")
    show.set_defaults(command=_show)

    pool = commands.add_parser("pool", help="list, add and remove the rollout instances of a run while it goes on")
    pool.add_argument("run", type=_path, metavar="RUN")
    wanted = pool.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--list", action="store_true", help="what every instance is doing")
    wanted.add_argument("--add", type=int, metavar="N", help="make N more instances")
    wanted.add_argument("--remove", type=int, metavar="ID", help="end one, after it has handed its trajectories over")
    pool.set_defaults(command=_pool)
    return parser


def _path(text: str) -> Path:
    """A path that was typed. Shells leave the `~` of `--out=~/run` as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=_path, metavar="RECIPE", help="a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the recipe; KEY= takes it out",
    )


def _train(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        raise RunError("`--resume` needs `--out RUN`: the folder of the run to continue")
    recipe, folder = _recipe_and_folder(options)

    from stretto.runtime.run import train_from_command_line

    return train_from_command_line(recipe, folder, resume=options.resume, part_of_compare=options.part_of_compare)


def _recipe_and_folder(options: argparse.Namespace) -> tuple[Recipe, Path]:
    """What is wrong with these two is said before torch is imported, which takes seconds."""
    from stretto.runtime.starting import (
        default_run_folder,
        refuse_another_recipe,
        refuse_nothing_to_resume,
        refuse_occupied,
    )

    _refuse_missing(options.recipe)
    folder = options.out or default_run_folder(options.recipe)
    if options.resume:
        refuse_nothing_to_resume(folder)
    else:
        refuse_occupied(folder)

    from stretto.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    if options.resume:
        refuse_another_recipe(recipe, folder)
    return recipe, folder


def _refuse_missing(recipe: Path) -> None:
    with contextlib.suppress(OSError):  # of a folder that may not be entered: `load_recipe` says so
        if not recipe.exists():
            raise RecipeError(f"recipe `{recipe}` does not exist")


def _check(options: argparse.Namespace) -> int:
    _refuse_missing(options.recipe)

    from stretto.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)

    from stretto.runtime.checking import check

    sys.stdout.write(check(recipe))
    return 0


def _compare(options: argparse.Namespace) -> int:
    _refuse_missing(options.recipe)

    from stretto.compare import compare_from_command_line

    return compare_from_command_line(
        options.recipe,
        options.overrides,
        paradigms=None if options.paradigms is None else options.paradigms.split(","),
        folder=options.out,
        target=options.target,
    )


def _verify(options: argparse.Namespace) -> int:
    from stretto.store.verify import exit_code, format_findings, verify

    findings = verify(options.run)
    sys.stdout.write(format_findings(findings) + "\n")
    return exit_code(findings)


def _replay(options: argparse.Namespace) -> int:
    from stretto.runtime.replaying import replay

    done = replay(options.run, until=options.until, out=options.out, say=_say)
    _say(str(done))
    return 0 if done.difference is None else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _show(options: argparse.Namespace) -> int:
    from rich.console import Console

    from stretto.observe.show import show

    Console().print(show(options.run, update=options.update, samples=options.samples))
    return 0


def _pool(options: argparse.Namespace) -> int:
    from stretto.runtime.control import ask, describe

    if options.add is not None and options.add < 1:
        raise RunError(f"`--add {options.add}` adds nothing; use at least 1")
    if options.list:
        request: dict[str, object] = {"do": "list"}
    elif options.add is not None:
        request = {"do": "add", "count": options.add}
    else:
        request = {"do": "remove", "instance": options.remove}
    sys.stdout.write(describe(ask(options.run, request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
