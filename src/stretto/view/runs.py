"""A run as the page sees it: its state, its updates, and what it waits for. Reads the journal, and never writes.

Everything is read again only after the journal has changed, and then only what is new: the lines of finished updates
and ended trajectories are kept. `fingerprint` is the cheap check for a change.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import JournalError, RunError, StrettoError
from stretto.store.lock import is_alive
from stretto.store.overview import State, recorded_totals, state_of
from stretto.store.recipe_history import Parts, recipe_changes, recipe_parts
from stretto.store.schema import ADMISSION, journal_path, opened_readonly, wal_path
from stretto.view.columns import STATES, Columns, Progress
from stretto.view.curves import Curves
from stretto.view.pauses import Pause, find_pauses

REFRESH_S = 0.5  # the least time between two reads of trajectories
MOST_UPDATES = 24  # whose trajectories are read first if a page wants them
CONFIG = "config.toml"


class RunSource:
    """One run folder. Methods may be called from several threads.

    Raises `RunError` if the folder is no run. A journal that cannot be read raises `JournalError` from the methods that
    read it: the page shows that, and goes on with the other runs.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.path = journal_path(folder)
        self.folder = self.path.resolve().parent
        self.name = name or self.folder.name
        self._lock = threading.Lock()
        self._open = threading.local()
        self._columns = Columns()
        self._columns_at: tuple[str, float] = ("", 0.0)
        self._curves = Curves()
        self._counts: tuple[str, dict[str, int]] = ("", {})
        self._pauses: tuple[int, tuple[Pause, ...]] = (0, ())  # for so many sessions
        self._changes: tuple[int, list[dict[str, Any]]] = (0, [])  # for so many phases

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Opens the journal to read it. Raises `JournalError` for whatever is wrong with it.

        Inside of another block of the same thread it is the same connection: to open one costs more than most reads.
        None is kept open in between, because the run that ends would then leave its `-wal` file behind.
        """
        if (opened := getattr(self._open, "db", None)) is not None:
            yield opened
            return
        with opened_readonly(self.path) as db:
            self._open.db = db
            try:
                yield db
            finally:
                self._open.db = None

    def fingerprint(self) -> str:
        """Returns a text that changes whenever the journal does, and not because somebody else reads it."""
        parts = []
        for path in (self.path, wal_path(self.path)):
            try:
                found = path.stat()
            except OSError:
                parts.append("-")
            else:  # an empty `-wal` file is one that a reader made
                parts.append(f"{found.st_size:x}.{found.st_mtime_ns:x}" if found.st_size else "-")
        return "_".join(parts)

    # -- the state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what the head of the page shows: the state of the run, its counts, and who waits for what."""
        fingerprint = self.fingerprint()
        with self.reading() as db:
            facts = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM run")}
            sessions = db.execute(
                "SELECT started_at, ended_at, outcome, error FROM sessions ORDER BY session"
            ).fetchall()
            done, first, last = db.execute(
                "SELECT COUNT(finished_at), MIN(taken_at), MAX(finished_at) FROM updates"
            ).fetchone()
            training = db.execute("SELECT update_id, taken_at FROM updates WHERE finished_at IS NULL").fetchone()
            newest = db.execute("SELECT MAX(version), MAX(published_at) FROM versions").fetchone()
            status = db.execute("SELECT at, state FROM status").fetchone()
            counts = self._count(db, fingerprint)
            notes = db.execute(
                f"SELECT kind, COUNT(*), MAX(at) FROM notes WHERE kind != '{ADMISSION}' GROUP BY kind ORDER BY 3 DESC"
            ).fetchall()
            num_failures = db.execute("SELECT COUNT(*) FROM failures").fetchone()[0]
            totals, pauses, changes = recorded_totals(db), self.pauses(), self._recipe_changes(db)
        condition = self.condition(sessions[-1][2] if sessions else None)
        # What an earlier session recorded last says nothing about a process that has taken the run up again.
        since = math.inf if condition == "running" and (not sessions or sessions[-1][2]) else 0.0
        since = max([since, *(session[0] for session in sessions[-1:])])
        if status is not None and status[0] < since:
            status = None
        if training is not None and condition == "running" and training[1] < since:
            training = None
        return {
            "name": self.name,
            "folder": str(self.folder),
            "fingerprint": fingerprint,
            "condition": condition,
            "facts": facts,
            "sessions": [
                {"started_at": started, "ended_at": ended, "outcome": outcome, "error": error}
                for started, ended, outcome, error in sessions
            ],
            "updates_done": done,
            "updates": facts.get("updates"),
            "first_batch_at": first,
            "last_update_at": last,
            "training": None if training is None else {"update": training[0], "since": training[1]},
            "newest": newest[0],
            "published_at": newest[1],
            "status": None if status is None else {"at": status[0], **json.loads(status[1])},
            "counts": counts,
            "totals": _main_totals(totals),
            "pauses": [[pause.start, pause.end, pause.shown_s] for pause in pauses],
            "recipe_changes": changes,
            "notes": [{"kind": kind, "count": count, "at": at} for kind, count, at in notes],
            "num_failures": num_failures,
            "now": time.time(),
        }

    def poll(self, after: int, seen: str) -> dict[str, Any]:
        """Returns what is new since the fingerprint `seen`: the state, and the numbers of updates behind `after`.

        Both are None if nothing has changed.
        """
        fingerprint = self.fingerprint()
        with contextlib.suppress(RunError):
            if seen == f"{fingerprint}{'+' if is_alive(self.folder) else '-'}":
                return {"seen": seen, "state": None, "curves": None}
        with self.reading():
            state, curves = self.state(), self.curves(after)
        lives = state["condition"] == "running"
        return {"seen": f"{fingerprint}{'+' if lives else '-'}", "state": state, "curves": curves}

    def condition(self, outcome: str | None) -> State:
        """Returns `running`, `stopped`, `failed`, `killed` or `finished`; `outcome` is that of the last session."""
        return state_of(self.folder, outcome)

    def _count(self, db: sqlite3.Connection, fingerprint: str) -> dict[str, int]:
        """Returns the number of trajectories in each state: from the arrays if they are whole, else by the index."""
        if self._counts[0] == fingerprint:
            return self._counts[1]
        with self._lock:
            columns = self._columns
            if columns.num_all and columns.progress.is_whole and self._columns_at[0] == fingerprint:
                found = np.bincount(columns["state"][columns["exists"] == 1], minlength=len(STATES)).tolist()
                counts: dict[str, int] = {state: count for state, count in zip(STATES, found, strict=True) if count}
            else:
                counts = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
            self._counts = (fingerprint, counts)
            return counts

    def _recipe_changes(self, db: sqlite3.Connection) -> list[dict[str, Any]]:
        """Returns the keys of the recipe that changed, with the first update of the new values."""
        (count,) = db.execute("SELECT COUNT(*) FROM phases").fetchone()
        if self._changes[0] != count:
            found = recipe_changes(recipe_parts(db, self.folder)) if count > 1 else []
            self._changes = (count, [{"update": first, "keys": keys} for first, keys in found])
        return self._changes[1]

    def notes(self, limit: int = 200) -> list[dict[str, Any]]:
        """Returns the last notes and failed attempts, newest first."""
        with self.reading() as db:
            rows = db.execute(
                f"SELECT at, kind, text FROM notes WHERE kind != '{ADMISSION}' UNION ALL "
                "SELECT at, kind || ' failed', 'trajectory ' || trajectory || ': ' || reason FROM failures "
                "ORDER BY 1 DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [{"at": at, "kind": kind, "text": text} for at, kind, text in rows]

    def recipe(self) -> dict[str, Any]:
        """Returns the recipe of the run as nested tables; empty if it cannot be read."""
        try:
            return tomllib.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def recipe_parts(self) -> Parts:
        """Returns the recipes of the run with the updates from which they hold; none if they cannot be read."""
        try:
            with self.reading() as db:
                return recipe_parts(db, self.folder)
        except JournalError:
            return []

    def pauses(self) -> tuple[Pause, ...]:
        """Returns the times between the sessions of the run, in order."""
        with self.reading() as db:
            (count,) = db.execute("SELECT COUNT(*) FROM sessions").fetchone()
            if self._pauses[0] != count:
                self._pauses = (count, find_pauses(db))
            return self._pauses[1]

    # -- what is kept --------------------------------------------------------------------------------------------------

    def curves(self, after: int = -1) -> dict[str, Any]:
        """Returns the numbers of the updates behind `after`, the evaluations, versions and instances."""
        fingerprint = self.fingerprint()
        with self._lock, self.reading() as db:
            self._curves.refresh(db)
            return {**self._curves.payload(after), "fingerprint": fingerprint}

    @contextmanager
    def columns(
        self, deadline_s: float = 0.8, wanted: tuple[int, int] | None = None
    ) -> Iterator[tuple[Columns, Progress]]:
        """Gives the trajectories as arrays: the `wanted` ones, and as many others as can be read in `deadline_s`."""
        with self._lock:
            columns, fingerprint, now = self._columns, self.fingerprint(), time.monotonic()
            changed = fingerprint != self._columns_at[0] and now - self._columns_at[1] >= REFRESH_S
            if changed or not columns.num_all or not columns.progress.is_whole:
                with self.reading() as db:
                    columns.refresh(db, deadline_s, wanted)
                self._columns_at = (fingerprint, now)
            yield columns, columns.progress

    def trained_in(self, first: float, last: float) -> tuple[int, int] | None:
        """Returns the lowest and the highest trajectory of the batches from one update to another; None if many."""
        if not 0 <= last - first <= MOST_UPDATES:
            return None
        with self.reading() as db:
            found = db.execute(
                "SELECT MIN(trajectory), MAX(trajectory) FROM members WHERE update_id BETWEEN ? AND ?", (first, last)
            ).fetchone()
        return None if found[0] is None else (found[0], found[1])


def open_runs(folders: list[Path]) -> list[RunSource]:
    """Opens run folders, each under a name of its own. Raises `RunError` for a folder that is no run."""
    names = [folder.resolve().name for folder in folders]
    found = []
    for folder, name in zip(folders, names, strict=True):
        if names.count(name) > 1:
            name = str(folder)
        found.append(RunSource(folder, name))
    return found


def refuse_unreadable(runs: list[RunSource]) -> None:
    """Raises what is wrong with the only run of a page. With several, the page shows what is wrong with one."""
    errors: list[StrettoError] = []
    for run in runs:
        try:
            run.state()
        except JournalError as error:
            errors.append(error)
    if len(errors) == len(runs):
        raise errors[0]


def _main_totals(totals: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the figures of a run as its summary has them; None if it has no sums yet."""
    if not totals.get("wall_s"):
        return None
    wall_s = float(totals["wall_s"])
    return {
        "tokens": totals["tokens"],
        "wall_seconds": wall_s,
        "tokens_per_second": totals["tokens"] / wall_s,
        "trainer_idle_share": max(0.0, 1.0 - totals["trainer_busy_s"] / wall_s),
    }
