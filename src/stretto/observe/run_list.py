"""Lists the runs below a folder, one line each. Reads a few rows of each journal, and imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.errors import RunError, printable
from stretto.store.overview import Overview, is_run, overview

DEEPEST = 6  # folders below the one that is named; runs are rarely deeper, and a data set has millions of folders
COLUMNS = {  # with their alignment
    "run": "<",
    "state": "<",
    "updates": ">",
    "held-out score": ">",
    "tokens/s": ">",
    "age": ">",
    "paradigm": "<",
    "started": "<",
    "size": ">",
    "problem": "<",
}


def runs_below(folder: Path) -> list[Overview]:
    """Returns the runs in a folder and below it, oldest first. Raises `RunError` if there is no such folder.

    Symbolic links and hidden folders are not followed, and nothing is looked for inside of a run.
    """
    if not folder.is_dir():
        raise RunError(f"`{folder}` is not a folder; name one that holds runs, such as `runs`")
    found = [overview(run) for run in _runs(folder, DEEPEST)]
    return sorted(found, key=lambda run: (run.started_at or 0.0, str(run.folder)))


def _runs(folder: Path, deepest: int) -> Iterator[Path]:
    try:
        if is_run(folder):
            yield folder
            return
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:  # a folder that may not be entered
        return
    for path in inside if deepest else ():
        if not os.path.basename(path).startswith("."):
            yield from _runs(Path(path), deepest - 1)


def as_json(runs: list[Overview], below: Path) -> list[dict[str, Any]]:
    """Returns the runs as values for JSON."""
    return [asdict(run) | {"folder": str(run.folder), "name": _name(run, below)} for run in runs]


def lines_of(runs: list[Overview], below: Path, width: int | None = None) -> list[str]:
    """Returns a head and a line for each run, cut to `width` characters."""
    rows = [list(COLUMNS), *([printable(cell) for cell in _cells(run, below)] for run in runs)]
    widths = [max(len(row[number]) for row in rows) for number in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = zip(row, widths, COLUMNS.values(), strict=True)
        line = "  ".join(f"{cell:{align}{most}}" for cell, most, align in cells).rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: width - 3]}...")
    return lines


def _cells(run: Overview, below: Path) -> list[str]:
    scores = (run.score_before, run.score_after)
    return [
        _name(run, below),
        run.state,
        f"{run.updates}" if run.planned is None else f"{run.updates} of {run.planned}",
        "-" if scores == (None, None) else " -> ".join("-" if score is None else f"{score:.3f}" for score in scores),
        "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "-" if run.age is None else f"{run.age:.2f}",
        run.paradigm or "-",
        "-" if run.started_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at)),
        readable_size(run.num_bytes),
        run.problem or "",
    ]


def _name(run: Overview, below: Path) -> str:
    """Returns the path of a run below the folder that was named; that of the folder itself if it is the run."""
    relative = run.folder.relative_to(below)
    return str(relative) if relative.parts else run.folder.resolve().name


def readable_size(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1_024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1_024
    return f"{num_bytes:.1f} TiB"
