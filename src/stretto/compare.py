"""The same recipe, seed and number of updates under several paradigms, a process each, one after another."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.config import PARADIGM_NAMES, Recipe, load_recipe
from stretto.core.paradigms import PARADIGMS
from stretto.errors import RecipeError, RunError


def compare_from_command_line(
    recipe: Path,
    overrides: Sequence[str],
    *,
    paradigms: Sequence[str] | None,
    folder: Path | None,
    target: float | None,
) -> int:
    """Run `compare`, print its table, write `compare.json`; returns the exit status."""
    folder = folder or Path("runs") / f"compare-{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    rows = compare(recipe, overrides, paradigms=paradigms or PARADIGM_NAMES, folder=folder, target=target)
    console = Console(width=max(Console().width, 170))  # fourteen columns do not fit into less
    console.print(comparison_table(rows))
    console.print(f"written to {folder / 'compare.json'}", highlight=False, markup=False)
    return 0


def compare(
    recipe: Path, overrides: Sequence[str], *, paradigms: Sequence[str], folder: Path, target: float | None = None
) -> list[dict[str, Any]]:
    """One run a paradigm in a fresh process; a row each with the names of `summary.json`.

    `target` is the accuracy of the column `seconds_to_target`; by default nine tenths of the way from the first
    evaluation to the best final one. Each row says which staleness it used, because paradigms that fix it override the
    recipe's.
    """
    unknown = [name for name in paradigms if name not in PARADIGMS]
    if unknown:
        raise RecipeError(f"`--paradigms` names `{unknown[0]}`; known: {', '.join(PARADIGM_NAMES)}")
    if (folder / "compare.json").exists():
        raise RunError(f"`{folder}` holds a comparison already; choose another `--out`")
    recipes = {name: load_recipe(recipe, overrides, compare_as=name) for name in paradigms}
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, resolved in recipes.items():
        summary = _run(resolved, folder / name)
        plan = resolved.plan
        rows.append(
            {
                "paradigm": name,
                "staleness_bound": plan.staleness,
                "in_flight": plan.in_flight,
                "rows": plan.rows,
                **summary,
            }
        )
    _add_time_to_target(rows, target)
    (folder / "compare.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return rows


def _run(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train in a process of its own, so that no run inherits another's threads, caches or memory."""
    path = folder.with_suffix(".toml")
    path.write_text(recipe.source_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "stretto.cli", "train", str(path), "--out", str(folder)]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise RunError(f"the run under `{recipe.rollout.paradigm}` ended with status {done.returncode}: see `{folder}`")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if summary["stopped"]:
        raise RunError(
            f"the run under `{recipe.rollout.paradigm}` was stopped after {summary['steps']} of "
            f"{recipe.training.steps} updates, so there is nothing to compare: see `{folder}`"
        )
    return summary


def _add_time_to_target(rows: list[dict[str, Any]], target: float | None) -> None:
    """Wall seconds of training until an evaluation first reached the target; absent where none did."""
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
    """The table that `compare` prints."""
    base = next((row["tokens_per_second"] for row in rows if row["paradigm"] == "synchronous"), None)
    target = rows[0]["target"]
    table = Table(title="paradigms on the same recipe, seed and number of updates")
    headers = [
        "paradigm",
        "K",
        "tok/s",
        "speed",
        "wall s",
        f"s to {target:.2f}" if target is not None else "s to target",
    ]
    headers += ["trainer idle", "rollout idle", "row idle", "dropped", "length ratio", "age mean (max)", "mixed"]
    headers += ["accuracy"]
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right")
    for row in rows:
        reached = row["seconds_to_target"]
        ends = [row["eval_before"], row["eval_after"]]
        accuracy = "-" if ends == [None, None] else " -> ".join("-" if e is None else f"{e:.2f}" for e in ends)
        table.add_row(
            row["paradigm"],
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
            accuracy,
        )
    return table
