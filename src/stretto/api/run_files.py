"""Files made of runs: a report to send, a trace of the timeline, an exported policy; and the runs of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from stretto.api.tables import Table
from stretto.errors import RunError

Say = Callable[[str], None]

LIST_COLUMNS = ("folder", "state", "updates", "planned", "score_before", "score_after", "tokens_per_second", "age")
TRACED = 20_000  # trajectories with spans of their own, at most


def list_runs(folder: str | Path = "runs") -> Table:
    """Returns a row for each run in a folder and below it, oldest first, as `stretto list` prints them.

    `stretto.open_run(row["folder"])` opens one. Raises `RunError` if there is no such folder.
    """
    from stretto.observe.run_list import runs_below

    rows = [asdict(run) | {"folder": str(run.folder)} for run in runs_below(Path(folder).expanduser())]
    return Table(rows, shown=LIST_COLUMNS, title=f"runs in {folder}")


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    verify: bool = True,
    tokenizer: str | Path | None = None,
    force: bool = False,
    say: Say | None = None,
) -> int:
    """Writes the page of `stretto view` with the data of runs into one HTML file, and returns its size in bytes.

    With `verify` it has the findings of `verify`. `tokenizer` is the folder with the `tokenizer.json` of the runs; by
    default that of each run's policy or model. A file that exists is replaced only with `force`.
    """
    from stretto.view import report
    from stretto.view.runs import open_runs

    target = _new_file(out, force)
    found = open_runs([Path(run) for run in runs])
    return report.write_report(
        found, target, verified=verify, tokenizer=tokenizer_file(tokenizer), say=say or (lambda text: None)
    )


def write_trace(run: str | Path, out: str | Path, *, trajectories: int = TRACED, force: bool = False) -> int:
    """Writes the timeline of a run for Perfetto, and returns the number of its events; see `stretto trace`."""
    from stretto.view import trace
    from stretto.view.runs import RunSource

    if trajectories < 0:
        raise RunError(f"`--trajectories {trajectories}` is no number of trajectories: give 0 or more")
    return trace.write_trace(RunSource(Path(run)), _new_file(out, force), trajectories)


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    merge: bool = False,
    push: str | None = None,
    public: bool = False,
    say: Say | None = None,
) -> None:
    """Writes the policy of a run to the new folder `out`, or uploads it to the hub, or both; see `stretto export`."""
    if public and push is None:
        raise RunError("`--public` has no effect without `--push NAME`; add it, or leave `--public` out")

    from stretto.assembly import policy_export

    target = None if out is None else Path(out)
    policy_export.export(Path(run), target, merge=merge, push=push, public=public, say=say or (lambda text: None))


def _new_file(out: str | Path, force: bool) -> Path:
    path = Path(out)
    if path.exists() and not force:
        raise RunError(f"`{path}` exists already; choose another `-o`, or replace it with `--force`")
    return path


def tokenizer_file(folder: str | Path | None) -> Path | None:
    """Returns the file of a tokenizer's folder. Raises `RunError` if it has none."""
    if folder is None:
        return None
    found = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not found.is_file():
        raise RunError(f"`--tokenizer {folder}` has no `tokenizer.json`: give the folder of a model")
    return found
