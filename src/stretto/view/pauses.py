"""The time between the sessions of a run, and a clock that all but leaves it out.

A run that was stopped and goes on a day later has a day in which nothing happened. The timeline shows a pause as a
narrow break: on the clock of `squeezed` it takes `Pause.shown_s` seconds. `page/data.js` has the same clock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SHARE = 0.03  # of the time in which the run was active, for one pause
MOST_SHARE = 0.15  # for all of them


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which no process ran the run. Times are in seconds since 1970."""

    start: float
    end: float
    shown_s: float  # its length on the clock of the timeline


def find_pauses(db: sqlite3.Connection) -> tuple[Pause, ...]:
    """Returns the pauses between the sessions of a run, in order."""
    sessions = db.execute("SELECT started_at, ended_at FROM sessions ORDER BY session").fetchall()
    found = []
    for (started, ended), (again, _) in pairwise(sessions):
        start = max(started, _last_sign(db, again) if ended is None else ended)
        if start < again:
            found.append((start, again))
    if not found:
        return ()
    active_s = found[-1][0] - sessions[0][0] - sum(end - start for start, end in found[:-1])
    shown_s = active_s * min(SHARE, MOST_SHARE / len(found))
    return tuple(Pause(start, end, min(end - start, shown_s)) for start, end in found)


def squeezed(times: NDArray[np.float64], pauses: Sequence[Pause]) -> NDArray[np.float64]:
    """Returns times on a clock on which each pause takes `shown_s`. Before the first pause, it is the usual clock."""
    found = times.astype(np.float64)
    for pause in pauses:
        length = pause.end - pause.start
        found = found - np.clip(times - pause.start, 0.0, length) * (1.0 - pause.shown_s / length)
    return found


def _last_sign(db: sqlite3.Connection, before: float) -> float:
    """Returns the time of the last change of a trajectory before a moment: that of a process that was killed.

    Changes are numbered in the order of time, so a search by halves needs few of them.
    """
    low, high, found = 0, db.execute("SELECT COALESCE(MAX(seq), 0) FROM transitions").fetchone()[0], 0.0
    while low < high:
        middle = (low + high + 1) // 2
        row = db.execute(
            "SELECT seq, at FROM transitions WHERE seq <= ? ORDER BY seq DESC LIMIT 1", (middle,)
        ).fetchone()
        if row is None or row[1] < before:
            low, found = middle, found if row is None else max(found, row[1])
        else:
            high = row[0] - 1
    return found
