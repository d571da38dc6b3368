"""The state and the main figures of a run, from a few small rows of its journal. Imports nothing heavy.

One read takes about a millisecond, whatever the size of the journal.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stretto.errors import RunError, SchemaError, StrettoError, first_line
from stretto.store.lock import is_alive
from stretto.store.schema import JOURNAL_NAME, opened_readonly

State = Literal["running", "starting", "finished", "stopped", "failed", "killed", "damaged", "other version"]
"""`stopped`: by Ctrl-C or a program; `failed`: by an error; `killed`: its last process ended without a word; all three
can be resumed. `damaged`: its journal is missing or cannot be read. `other version`: another
version of stretto wrote it, and this one cannot read it."""


@dataclass(frozen=True, slots=True)
class Overview:
    """One run. A figure is None if the run has none yet, or if it cannot be read."""

    folder: Path
    state: State
    problem: str | None = None  # the error that it failed by, or why its journal cannot be read
    paradigm: str | None = None
    updates: int = 0  # finished
    planned: int | None = None
    score_before: float | None = None  # on held-out prompts
    score_after: float | None = None  # of the last evaluation
    tokens_per_second: float | None = None
    age: float | None = None  # mean, of the trained trajectories, in updates
    started_at: float | None = None
    sessions: int = 0
    num_bytes: int = 0  # of the run folder


def is_run(folder: Path) -> bool:
    """Tells if a folder holds a run: it has a journal, or the lock of one beside a recipe."""
    return (folder / JOURNAL_NAME).is_file() or (
        (folder / f"{JOURNAL_NAME}.lock").is_file() and (folder / "config.toml").is_file()
    )


def overview(folder: Path) -> Overview:
    """Returns the state and the figures of a run. Whatever is wrong with it is said in `problem`; nothing is raised."""
    num_bytes = _size(folder)
    alive = False
    try:
        alive = is_alive(folder)
        if not (folder / JOURNAL_NAME).is_file():
            state: State = "starting" if alive else "damaged"
            return Overview(folder, state, None if alive else "its journal is missing", num_bytes=num_bytes)
        with opened_readonly(folder / JOURNAL_NAME) as db:
            return _read(folder, db, alive, num_bytes)
    except (StrettoError, OSError) as error:
        problem = first_line(error)
        for path in (folder / JOURNAL_NAME, (folder / JOURNAL_NAME).resolve()):
            problem = problem.replace(f"journal `{path}`", "its journal").replace(f"`{path}`", "its journal")
        unreadable: State = "other version" if isinstance(error, SchemaError) else "damaged"
        return Overview(folder, "running" if alive else unreadable, problem, num_bytes=num_bytes)


def _read(folder: Path, db: sqlite3.Connection, alive: bool, num_bytes: int) -> Overview:
    db.execute("BEGIN")  # one moment of a run that may be active
    facts = {
        key: json.loads(value)
        for key, value in db.execute("SELECT key, value FROM run WHERE key IN ('paradigm', 'updates')")
    }
    sessions = db.execute("SELECT started_at, outcome, error FROM sessions ORDER BY session").fetchall()
    last = db.execute("SELECT update_id FROM updates WHERE finished_at IS NOT NULL ORDER BY 1 DESC LIMIT 1").fetchone()
    scores = db.execute("SELECT kind, reward FROM evaluations WHERE reward IS NOT NULL ORDER BY id").fetchall()
    outcome = sessions[-1][1] if sessions else None
    totals = recorded_totals(db)
    ages = totals.get("ages", {})
    uses = sum(ages.values())
    state = "starting" if alive and not sessions else run_state(alive, outcome)
    return Overview(
        folder,
        state=state,
        problem=sessions[-1][2] if state == "failed" else None,
        paradigm=str(facts["paradigm"]) if "paradigm" in facts else None,
        updates=int(last[0]) + 1 if last else 0,
        planned=int(facts["updates"]) if "updates" in facts else None,
        score_before=next((float(reward) for kind, reward in scores if kind == "before"), None),
        score_after=next((float(reward) for kind, reward in reversed(scores) if kind != "before"), None),
        tokens_per_second=totals["tokens"] / totals["wall_s"] if totals.get("wall_s") else None,
        age=sum(int(age) * count for age, count in ages.items()) / uses if uses else None,
        started_at=float(sessions[0][0]) if sessions else None,
        sessions=len(sessions),
        num_bytes=num_bytes,
    )


def recorded_totals(db: sqlite3.Connection) -> Mapping[str, Any]:
    """Returns the sums of a run over all of its sessions, without the time between them; empty if it has none yet.

    A session that ended has its own sums; one that goes on or was killed those of its last update.
    """
    session = db.execute("SELECT outcome, totals FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
    update = db.execute("SELECT totals FROM updates WHERE finished_at IS NOT NULL ORDER BY update_id DESC LIMIT 1")
    ended = session[1] if session is not None and session[0] else None
    found: Mapping[str, Any] = json.loads(ended or (update.fetchone() or (None,))[0] or "{}")
    return found


def run_state(alive: bool, outcome: str | None) -> State:
    """Returns the state of a run whose last session has this outcome.

    One that a process holds is running, whatever its last session was: a finished run may be about to go on.
    """
    if alive:
        return "running"
    ended: Mapping[str | None, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
    return ended.get(outcome, "killed")


def state_of(folder: Path, outcome: str | None) -> State:
    """Does the same for the run in a folder. One whose lock cannot be read is taken for one that no process holds."""
    alive = False
    with contextlib.suppress(RunError):
        alive = is_alive(folder)
    return run_state(alive, outcome)


def described(state: State, error: str | None) -> str:
    """Returns the state of a run in words, with the error that it failed by."""
    return f"failed: {error}" if state == "failed" and error else state


def _size(folder: Path) -> int:
    """Returns the bytes of all files of a folder. Files that vanish meanwhile are skipped."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.is_file():
                    total += path.stat().st_size
    return total
