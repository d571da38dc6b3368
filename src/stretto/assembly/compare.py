"""`compare`: trains one recipe under several paradigms, and with several engines if it is asked to.

Each run has its own process, one after another.

The folder holds the state: a finished run in it is used as it is, a stopped run is resumed, and the table and
`compare.json` are written again after every run. So the same command continues an interrupted comparison.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from stretto.core.paradigms import PARADIGMS
from stretto.errors import RecipeError, RunError, StrettoError
from stretto.observe.console import make_console
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import PARADIGM_NAMES, Recipe
from stretto.run.command_hint import command
from stretto.run.folder_checks import refuse_lost, refuse_unwritable, standing
from stretto.run.interrupts import handled
from stretto.run.recipe_changes import refuse_another_recipe

TABLE_WIDTH = 185  # least, for fifteen columns
ENGINES = ("native", "vllm")
STOPPED = 130  # exit status of a run that was stopped and can be resumed


class ComparisonStoppedError(StrettoError):
    """Ctrl-C, or a run that was stopped. Finished runs are in the folder."""


class RunFailedError(RunError):
    """A run ended with an error. Finished runs are in the folder."""


def compare_from_command_line(
    recipe: Path,
    overrides: Sequence[str],
    *,
    paradigms: Sequence[str] | None,
    folder: Path | None,
    target: float | None,
    engines: Sequence[str] | None = None,
    train_options: Sequence[str] = (),
) -> int:
    """Runs `compare`, prints its table after every paradigm, and writes `compare.json`. Returns the exit status.

    `train_options` are further arguments of the command `train`.
    """
    chosen = folder or Path("runs") / f"compare-{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    console = make_console()
    wide = make_console(max(console.width, TABLE_WIDTH))

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    same_command = _command(recipe, overrides, paradigms, engines, chosen, target)
    try:
        rows: Sequence[Mapping[str, Any]] = ()
        for rows in comparison(
            recipe,
            overrides,
            paradigms=paradigms,
            engines=engines,
            folder=chosen,
            target=target,
            say=say,
            train_options=train_options,
        ):
            wide.print(comparison_table(rows))
    except (ComparisonStoppedError, KeyboardInterrupt):
        say(f"interrupted; finished runs are kept; continue with\n  {same_command}")
        return STOPPED
    except RunFailedError as error:
        raise RunError(
            f"{error}\n  finished runs are kept; once that is fixed, continue with\n  {same_command}"
        ) from error
    say(f"written to {chosen / 'compare.json'}")
    return 0


def _command(
    recipe: Path,
    overrides: Sequence[str],
    paradigms: Sequence[str] | None,
    engines: Sequence[str] | None,
    folder: Path,
    target: float | None,
) -> str:
    words: list[str | Path] = ["compare", recipe]
    for override in overrides:
        words += ["--set", override]
    if paradigms is not None:
        words += ["--paradigms", ",".join(paradigms)]
    if engines is not None:
        words += ["--engines", ",".join(engines)]
    if target is not None:
        words += ["--target", str(target)]
    return command(*words, "--out", folder)


def compare(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    folder: str | Path,
    paradigms: Sequence[str] | None = None,
    target: float | None = None,
    engines: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Runs a recipe under several paradigms, and with several engines, and returns a row for each; see `comparison`.

    Each paradigm runs in its own process, which prints its progress. Runs in `folder` that are finished are kept, and
    one that was stopped is resumed. Raises `ComparisonStoppedError` if a run is stopped, and `RunError` if one fails.
    """
    *_, rows = comparison(
        Path(recipe),
        overrides,
        paradigms=paradigms,
        engines=engines,
        folder=Path(folder),
        target=target,
        say=lambda text: None,
    )
    return rows


def comparison(
    recipe: Path,
    overrides: Sequence[str],
    *,
    paradigms: Sequence[str] | None,
    engines: Sequence[str] | None = None,
    folder: Path,
    target: float | None = None,
    say: Callable[[str], None],
    train_options: Sequence[str] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Trains one run for each paradigm. After each, yields a row for every run so far, with the keys of `summary.json`.

    `paradigms` None: all that the engine serves. `engines`: there is a run for each paradigm with each of them; None:
    with that of the recipe.
    `target` is the accuracy of the column `seconds_to_target`; by default nine tenths of the way from the first
    evaluation to the best final one. Each row names the staleness that was used, because some paradigms override the
    recipe's. Nothing runs before all recipes and folders have been checked.
    """
    if paradigms is not None:
        _refuse_names("paradigms", "synchronous,multi-version", paradigms, PARADIGM_NAMES)
    if engines is not None:
        _refuse_names("engines", "native,vllm", engines, ENGINES)
    as_it_stands = load_recipe(recipe, overrides)  # before it is changed into others
    recipes = {}
    for engine in engines or [as_it_stands.engine.type]:
        with_engine = [*overrides, *_engine_overrides(as_it_stands, engine)]
        for paradigm in _served_paradigms(engine) if paradigms is None else paradigms:
            name = paradigm if engines is None else f"{paradigm}-{engine}"
            recipes[name] = load_recipe(recipe, with_engine, compare_as=paradigm)
    for name, own in recipes.items():
        _refuse_folder(own, folder / name)
    for each in engines or ():
        _refuse_engine([(own, folder / name) for name, own in recipes.items() if own.engine.type == each])
    refuse_unwritable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, own in recipes.items():
        summary = _run(own, folder / name, say, train_options)
        plan = own.plan
        rows.append(
            {
                "paradigm": plan.paradigm.name,
                "engine": own.engine.type,
                "staleness_bound": plan.staleness,
                "in_flight": plan.in_flight,
                "rows": plan.rows,
                **summary,
            }
        )
        _add_time_to_target(rows, target)
        _write(folder / "compare.json", rows)
        yield rows


def _refuse_names(option: str, example: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises `RecipeError` for names that are empty, unknown, or there twice."""
    if not names or not all(names):
        raise RecipeError(
            f"`--{option} {','.join(names)!r}` leaves a name empty; write names with commas between them, such as "
            f"`{example}`, or leave it out"
        )
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"`--{option}` names `{unknown[0]}`; known: {', '.join(known)}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RecipeError(f"`--{option}` names `{twice[0]}` more than once; name each once")


def _served_paradigms(engine: str) -> Sequence[str]:
    """Returns the paradigms that an engine serves."""
    return [name for name in PARADIGM_NAMES if engine == "native" or PARADIGMS[name].pinned]


def _engine_overrides(recipe: Recipe, engine: str) -> list[str]:
    """Returns the overrides that give a recipe another engine, without the options of its own."""
    return [] if engine == recipe.engine.type else [f'engine={{type = "{engine}"}}']


def _refuse_folder(recipe: Recipe, folder: Path) -> None:
    """Raises `RunError` if the folder holds anything but a run of this recipe."""
    match standing(folder):
        case "empty":
            return
        case "foreign":
            raise RunError(f"`{folder}` exists already and is no run; choose another `--out`")
        case "lost":
            refuse_lost(folder)
        case _:
            refuse_another_recipe(
                recipe, folder, "compare with the settings that it was started with, or choose another `--out`"
            )


def _refuse_engine(runs: Sequence[tuple[Recipe, Path]]) -> None:
    """Raises `RecipeError` if the engine of these runs is missing, or cannot serve their model, and one is to run."""
    left = [recipe for recipe, folder in runs if standing(folder) != "finished"]
    if left and left[0].engine.type != "native":
        from stretto.assembly.check import check_engine  # which imports torch: this process needs it for nothing else

        check_engine(left[0])


def _run(recipe: Recipe, folder: Path, say: Callable[[str], None], train_options: Sequence[str] = ()) -> dict[str, Any]:
    """Uses a finished run, resumes a stopped one, or begins. Returns the summary.

    Each run has its own process, so that none inherits the threads, caches or memory of another.
    """
    name, options = folder.name, ["--out", str(folder), "--part-of-compare", *train_options]
    match standing(folder):
        case "finished":
            say(f"{name}: finished before, taken from {folder}")
            return _summary(folder)
        case "stopped":
            say(f"{name}: continued in {folder}")
            options.append("--resume")
        case _:
            say(f"{name}: begins in {folder}")
    path = folder.with_suffix(".toml")
    path.write_text(recipe.source_toml(), encoding="utf-8")
    status = _train([sys.executable, "-m", "stretto", "train", str(path), *options])
    if status == STOPPED:
        raise ComparisonStoppedError(
            f"the comparison was stopped in the run under `{name}`, in `{folder}`; the same call continues it"
        )
    if status != 0:
        there = f", and `{folder}`" if folder.exists() else ""
        raise RunFailedError(f"the run under `{name}` ended with status {status}: see above{there}")
    return _summary(folder)


def _train(words: Sequence[str]) -> int:
    """Runs a command to its end. Returns its exit status, or `STOPPED`.

    Ctrl-C and SIGTERM are passed on as SIGTERM, and the command is waited for, so that it can write a checkpoint. (With
    a terminal, Ctrl-C reaches both processes.) Outside of the main thread nothing is passed on.
    """
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    with handled({signal.SIGTERM: stop}):
        process = subprocess.Popen(words)
        if stopped:  # before there was anything to stop
            process.terminate()
        while True:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                stop()
                continue
            # A run that reaches its end all the same is finished, but no other begins.
            return STOPPED if stopped or status == -signal.SIGINT else status


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the file at once, so that a reader never sees a part of it."""
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def _add_time_to_target(rows: list[dict[str, Any]], target: float | None) -> None:
    """Adds to each row the seconds of training until an evaluation first reached the target; None if none did."""
    finals = [row["eval_after"] for row in rows if row["eval_after"] is not None]
    if target is None and finals:
        before = min((row["eval_before"] for row in rows if row["eval_before"] is not None), default=0.0)
        target = before + 0.9 * (max(finals) - before)
    for row in rows:
        scored = [e for e in row["evaluations"] if e["score"] is not None]
        reached = [e["elapsed_s"] for e in scored if target is not None and e["score"] >= target]
        row["target"] = target
        row["seconds_to_target"] = min(reached, default=None)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table that `compare` prints."""
    base = next((row["tokens_per_second"] for row in rows if row["paradigm"] == "synchronous"), None)
    several = len({row.get("engine", "native") for row in rows}) > 1
    target = rows[0]["target"]
    what = "paradigms and engines" if several else "paradigms"
    table = Table(title=f"{what} on the same recipe, seed and number of updates")
    headers = [
        "paradigm",
        *["engine"] * several,
        "K",
        "tok/s",
        "speed",
        "training s",
        f"s to {target:.2f}" if target is not None else "s to target",
    ]
    headers += ["trainer idle", "rollout idle", "row idle", "dropped", "length ratio", "age mean (max)", "mixed"]
    dropped = any(row.get("dropped_length") is not None for row in rows)
    headers += ["length dropped / trained"] * dropped
    greedy = any(score is not None for row in rows for score in _greedy_scores(row))
    headers += ["accuracy", *["greedy"] * greedy]
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index <= several else "right")
    for row in rows:
        reached = row["seconds_to_target"]
        table.add_row(
            row["paradigm"],
            *[row.get("engine", "native")] * several,
            str(row["staleness_bound"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / base:.2f} x" if base else "-",
            f"{row['wall_seconds']:.1f}",
            "-" if reached is None else f"{reached:.1f}",
            f"{row['trainer_idle_share']:.0%}",
            f"{row['rollout_idle_share']:.0%}",
            f"{row['row_idle_share']:.0%}",
            f"{row['dropped_share']:.1%}",
            f"{row['length_ratio']:.3f}",
            f"{row['staleness']['mean']:.2f} ({row['staleness']['max']})",
            f"{row['mixed_version_share']:.0%}",
            *[_dropped_length(row)] * dropped,
            _from_to(row["eval_before"], row["eval_after"]),
            *[_from_to(*_greedy_scores(row))] * greedy,
        )
    return table


def _greedy_scores(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns the greedy scores before and after a run; a finished run of an earlier release has no key for them."""
    return row.get("eval_before_greedy"), row.get("eval_after_greedy")


def _dropped_length(row: Mapping[str, Any]) -> str:
    """Returns the mean length of dropped trajectories, as far as they had come, and of trained ones, as one cell."""
    length = row.get("dropped_length")
    return "-" if length is None else f"{length:.1f} / {row['trained_length']:.1f}"


def _from_to(before: float | None, after: float | None) -> str:
    """Returns the scores before and after a run as one cell."""
    if before is None and after is None:
        return "-"
    return " -> ".join("-" if score is None else f"{score:.2f}" for score in (before, after))
