"""Changes of states, which every other change of trajectories and updates is written with."""

from __future__ import annotations

import sqlite3

from stretto.errors import JournalError
from stretto.store.blobs import storable
from stretto.store.schema import ENDS, State

NOT_ENDED = f"state NOT IN {ENDS!r}"


def change_state(db: sqlite3.Connection, trajectory: int, to_state: State, at: float, reason: str = "") -> None:
    """Records a transition from the current state. Raises `JournalError` after an end."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
        f"SELECT trajectory, state, ?, ?, ? FROM trajectories WHERE trajectory = ? AND {NOT_ENDED}",
        (to_state, at, storable(reason), trajectory),
    )
    if added.rowcount != 1:
        found = db.execute("SELECT state FROM trajectories WHERE trajectory = ?", (trajectory,)).fetchone()
        was = "was never admitted" if found is None else f"has already ended as `{found[0]}`"
        raise JournalError(f"trajectory {trajectory} {was} and cannot become `{to_state}`")
    db.execute("UPDATE trajectories SET state = ? WHERE trajectory = ?", (to_state, trajectory))


def change_members(db: sqlite3.Connection, update: int, to_state: State, at: float, only: str = "") -> int:
    """Changes the state of the first uses in a batch, in order, with two statements; returns how many changed."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) SELECT t.trajectory, t.state, ?, ?, '' "
        "FROM members m JOIN trajectories t USING (trajectory) "
        f"WHERE m.update_id = ? AND m.use = 0 AND t.{NOT_ENDED} {only} GROUP BY t.trajectory ORDER BY MIN(m.position)",
        (to_state, at, update),
    )
    db.execute(
        f"UPDATE trajectories AS t SET state = ? WHERE t.{NOT_ENDED} {only} AND t.trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (to_state, update),
    )
    return added.rowcount
