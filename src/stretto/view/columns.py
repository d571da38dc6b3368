"""The trajectories of a run as arrays, read from its journal a part at a time and kept up to date.

A journal of a million trajectories takes seconds to read, and a page has to answer at once. So `refresh` reads what
the page wants to see, then the newest until its deadline; the next call goes on there. What is read is read again only
if it may have changed: an end is final.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.store.schema import ENDS, UNDER_WAY

STATES = (*UNDER_WAY, *ENDS)  # a state is its place here
FINISHES = ("", "stop", "length")
NUM_UNDER_WAY = len(UNDER_WAY)
CHUNK = 8_192  # trajectories of a part
NONE = -1
NO_REWARD = -1e300  # SQLite has no NaN

_STATE = " ".join(f"WHEN '{state}' THEN {place}" for place, state in enumerate(STATES))
_FINISH = " ".join(f"WHEN '{finish}' THEN {place}" for place, finish in enumerate(FINISHES) if finish)

_ROWS = f"""SELECT trajectory, group_id, version, CASE state {_STATE} ELSE 0 END, COALESCE(instance, {NONE}),
    COALESCE(reward, {NO_REWARD}), error IS NOT NULL FROM trajectories WHERE trajectory >= ? AND trajectory < ?"""
_COMPLETIONS = f"""SELECT trajectory, lineage, num_sampled, CASE finish {_FINISH} ELSE 0 END, started_at, finished_at
    FROM completions INDEXED BY completions_in_short WHERE trajectory >= ? AND trajectory < ?
    ORDER BY trajectory, lineage"""
_MEMBERS = """SELECT trajectory, update_id FROM members INDEXED BY members_train_once
    WHERE trajectory >= ? AND trajectory < ? AND use = 0"""
_FAILED = "SELECT trajectory, COUNT(*) FROM failures WHERE trajectory >= ? AND trajectory < ? GROUP BY trajectory"
_ADMITTED = """SELECT trajectory, admitted_at FROM trajectories t JOIN groups USING (group_id)
    WHERE trajectory >= ? AND trajectory < ? AND num_lineages IS NULL"""

_ROW = np.dtype(
    [("id", "i8"), ("group", "i8"), ("version", "i4"), ("state", "u1"), ("instance", "i4"), ("reward", "f8"),
     ("error", "u1")]
)  # fmt: skip
_COMPLETION = np.dtype(
    [("id", "i8"), ("lineage", "i4"), ("length", "i8"), ("finish", "u1"), ("started", "f8"), ("finished", "f8")]
)
_PAIR = np.dtype([("id", "i8"), ("value", "f8")])

FIELDS = {
    "group": "i8", "version": "i4", "state": "u1", "instance": "i4", "reward": "f4", "error": "u1", "length": "i4",
    "finish": "u1", "lineages": "i2", "started": "f8", "finished": "f8", "update": "i4", "failures": "i2",
    "exists": "u1",
}  # fmt: skip
EMPTY = {"reward": np.nan, "started": np.nan, "finished": np.nan, "update": NONE, "instance": NONE}


@dataclass(frozen=True, slots=True)
class Progress:
    """The share of a journal that is read."""

    num_read: int
    num_all: int

    @property
    def is_whole(self) -> bool:
        return self.num_read >= self.num_all


class Columns:
    """One array for each field, with the trajectory as the index. Not for several threads at once.

    `exists` is 0 for trajectories that are not read yet. `reward` and the times are NaN where there is none; `update`
    and `instance` are -1. `finished` of a trajectory that still generates is NaN, and `started` is the moment at which
    its group was admitted.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype=kind) for name, kind in FIELDS.items()}
        self._is_read = np.zeros(0, dtype=bool)  # one for each part
        self.num_all = 0

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The values of all trajectories."""
        return self._arrays[name][: self.num_all]

    @property
    def progress(self) -> Progress:
        """The share that is read so far."""
        parts = int(self._is_read.sum())
        short = len(self._is_read) * CHUNK - self.num_all if len(self._is_read) and self._is_read[-1] else 0
        return Progress(parts * CHUNK - short, self.num_all)

    def refresh(self, db: sqlite3.Connection, deadline_s: float, wanted: tuple[int, int] | None = None) -> None:
        """Reads again what may have changed, then the parts with the trajectories `wanted`, then the newest first.

        Takes about `deadline_s` seconds at most, but reads what is wanted in any case.
        """
        until = time.monotonic() + deadline_s
        (last,) = db.execute("SELECT MAX(trajectory) FROM trajectories").fetchone()
        self._grow(0 if last is None else last + 1)
        for part in np.flatnonzero(self._is_read).tolist():
            if (start := self._first_open(part)) is not None:
                self._read(db, start, min((part + 1) * CHUNK, self.num_all))
        unread = np.flatnonzero(~self._is_read)[::-1].tolist()
        if wanted is not None:
            low, high = wanted[0] // CHUNK, wanted[1] // CHUNK
            unread.sort(key=lambda part: not low <= part <= high)  # stable: the others stay newest first
        for place, part in enumerate(unread):
            needed = wanted is not None and low <= part <= high
            if place and not needed and time.monotonic() > until:
                break
            self._read(db, part * CHUNK, min((part + 1) * CHUNK, self.num_all))
            self._is_read[part] = True

    def _first_open(self, part: int) -> int | None:
        """Returns the first trajectory of a part that may change; None if all of them have ended."""
        inside = slice(part * CHUNK, min((part + 1) * CHUNK, self.num_all))
        ended = (self._arrays["state"][inside] >= NUM_UNDER_WAY) & (self._arrays["exists"][inside] == 1)
        return None if ended.all() else inside.start + int(np.argmin(ended))

    def _grow(self, size: int) -> None:
        self.num_all = size
        parts = -(-size // CHUNK)
        if parts > len(self._is_read):
            self._is_read = np.append(self._is_read, np.zeros(parts - len(self._is_read), dtype=bool))
        have = len(self._arrays["version"])
        if size <= have:
            return
        room = max(size, have + have // 2, CHUNK)
        for name, array in self._arrays.items():
            grown = np.full(room, EMPTY.get(name, 0), dtype=array.dtype)
            grown[:have] = array
            self._arrays[name] = grown

    def _read(self, db: sqlite3.Connection, start: int, end: int) -> None:
        bounds, a = (start, end), self._arrays
        for name, array in a.items():
            array[start:end] = EMPTY.get(name, 0)
        rows = np.fromiter(db.execute(_ROWS, bounds), dtype=_ROW)
        ids = rows["id"]
        a["exists"][ids] = 1
        for name in ("group", "version", "state", "instance", "error"):
            a[name][ids] = rows[name]
        a["reward"][ids] = np.where(rows["reward"] == NO_REWARD, np.nan, rows["reward"])
        made = np.fromiter(db.execute(_COMPLETIONS, bounds), dtype=_COMPLETION)
        if len(made):
            first = np.flatnonzero(np.diff(made["id"], prepend=-1))
            owners = made["id"][first]
            a["length"][owners] = np.add.reduceat(made["length"], first)
            a["started"][owners] = np.minimum.reduceat(made["started"], first)
            a["finished"][owners] = np.maximum.reduceat(made["finished"], first)
            a["finish"][owners] = np.maximum.reduceat(made["finish"], first)  # `length` if one lineage was cut
            a["lineages"][owners] = np.diff(np.append(first, len(made)))
        for query, name in ((_MEMBERS, "update"), (_FAILED, "failures"), (_ADMITTED, "started")):
            pairs = np.fromiter(db.execute(query, bounds), dtype=_PAIR)
            a[name][pairs["id"]] = pairs["value"]
