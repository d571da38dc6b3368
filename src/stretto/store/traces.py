"""Detects a journal that was removed, emptied or replaced by an older copy, from the other files of the run folder.

A run writes each of these files only after the journal has on disk what they follow from (`resume_point.py`):

| file                                    | recorded in the journal before                      |
|-----------------------------------------|-----------------------------------------------------|
| `versions/`, `checkpoints/`, `policy/`  | the run itself                                      |
| `metrics.jsonl`, `summary.json`         | the run itself                                      |
| `versions/000042.safetensors`           | the batch of update 41                              |
| a line of update 41 in `metrics.jsonl`  | the batch of update 41                              |
| `checkpoints/000042`                    | the end of update 41                                |
| `journal.sqlite-wal`                    | a file `journal.sqlite` that is not empty           |

So if the journal has less, it (or its `-wal` file) was removed, emptied or replaced by an older copy. Resuming from it
would silently train the same data again. `config.toml`, `pool/`, `reward.log`, `run.log` and the lock may exist before
the journal, so they prove nothing: a run with no other files was killed at its start, and starts again.

Nothing here changes a file. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.store.numbered_names import CHECKPOINT, VERSION, numbered
from stretto.store.schema import JOURNAL_NAME, check_schema, check_whole, open_readonly, reading, wal_path

BEGUN = ("versions", "checkpoints", "policy", "metrics.jsonl", "summary.json")  # written only after the run is recorded
NONE = -1  # updates of a journal in which no run is recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """The progress of a run as its journal has it."""

    words: str  # the state of the journal, as a sentence without its subject
    taken: int = NONE  # updates whose batches are recorded
    finished: int = NONE  # updates whose ends are recorded
    complete: bool = False  # the whole run is recorded
    lost: str | None = None  # a sentence that says which records are missing; None: none that can be detected

    @property
    def begun(self) -> bool:
        """True if the run is recorded."""
        return self.taken != NONE


@dataclass(frozen=True, slots=True)
class _Trace:
    """A file that proves that the journal once had these records."""

    words: str
    taken: int  # at least this many updates had their batches in the journal
    finished: int  # at least this many had their ends in it


def recorded_in(run_folder: Path) -> Recorded:
    """Returns the progress of a run as its journal has it, and which records are missing.

    Raises `JournalError` if the journal cannot be read.
    """
    traces = list(_traces(run_folder))  # before the journal is read: an active run writes its journal first
    path = run_folder / JOURNAL_NAME
    found = _read(path)
    lost = next((each for each in traces if each.taken > found.taken or each.finished > found.finished), None)
    return found if lost is None else replace(found, lost=f"`{path}` {found.words}, but {lost.words}")


def refuse_damaged(run_folder: Path) -> None:
    """Raises `JournalError` if the pages of a run's journal are damaged. Reads all of it: a second or two for 1 GB."""
    path = run_folder / JOURNAL_NAME
    if _size(path):
        with reading(path), contextlib.closing(open_readonly(path)) as db:
            check_whole(db, path)


def _read(path: Path) -> Recorded:
    # SQLite removes the `-wal` file of an empty journal when it opens it, so an empty journal is not opened.
    if not path.exists():
        return Recorded("does not exist")
    if not path.is_file():
        return Recorded("is not a file")
    if not _size(path):
        return Recorded("is empty (0 bytes)")
    with reading(path), contextlib.closing(open_readonly(path)) as db:
        if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
            return Recorded("has no tables")
        check_schema(db, path)
        db.execute("BEGIN")  # one snapshot of a run that may be active
        if not db.execute("SELECT 1 FROM run WHERE key = 'paradigm'").fetchone():
            return Recorded("has no run recorded in it")
        taken = db.execute("SELECT update_id + 1 FROM updates ORDER BY update_id DESC LIMIT 1").fetchone()
        finished = db.execute(
            "SELECT update_id + 1 FROM updates WHERE finished_at IS NOT NULL ORDER BY update_id DESC LIMIT 1"
        ).fetchone()
        # A finished run that goes on has a later session.
        last = db.execute("SELECT outcome FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
        complete = last is not None and last[0] == "finished"
    done = 0 if finished is None else int(finished[0])
    words = f"has {done} finished {'update' if done == 1 else 'updates'}"
    return Recorded(words, 0 if taken is None else int(taken[0]), done, complete)


def _traces(folder: Path) -> Iterator[_Trace]:
    """Returns the traces of a run; those that prove most come first."""
    updates, path = _newest(folder / "checkpoints", CHECKPOINT)
    if path is not None and updates > 0:
        yield _Trace(f"`{path}` was written after update {updates - 1}", updates, updates)
    version, path = _newest(folder / "versions", VERSION)
    if path is not None and version > 0:
        yield _Trace(f"`{path}` was made by update {version - 1}", version, 0)
    metrics = folder / "metrics.jsonl"
    if (update := _last_update(metrics)) is not None:
        yield _Trace(f"`{metrics}` has a line of update {update}", update + 1, 0)
    for name in BEGUN:
        if (folder / name).exists():
            yield _Trace(f"`{folder / name}` exists, so the run had started", 0, 0)
    journal = folder / JOURNAL_NAME
    if _size(wal_path(journal)) and not _size(journal):
        yield _Trace(f"`{wal_path(journal)}`, which is a part of it, is not empty", 0, 0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _newest(folder: Path, suffix: str) -> tuple[int, Path | None]:
    """Returns the highest number that names a complete file or folder, and its path."""
    return max(numbered(folder, suffix).items(), default=(0, None))


def _last_update(metrics: Path) -> int | None:
    """Returns the last update that has a line in `metrics.jsonl`. A line that was cut off is skipped."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:  # `BEGUN` covers that it exists
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case {"update": int(update)}:
                    return update
    return None
