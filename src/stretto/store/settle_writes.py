"""Completes the decisions that a killed run had recorded only partly, before the run continues."""

from __future__ import annotations

import sqlite3

from stretto.store.trajectory_writes import dropped, failed, filtered
from stretto.store.transition_writes import NOT_ENDED


def settle(
    db: sqlite3.Connection, retries: int, drops: bool, at: float, wanted: int = 0, last_update: int | None = None
) -> None:
    """Completes the decisions of a killed run that were only partly recorded.

    A trajectory whose last attempt failed becomes `failed`. A group that is partly filtered becomes `filtered`. With
    `drops`, trajectories past their deadline become `dropped`, and all others once the batch of `last_update` is taken.
    If groups have more trajectories than the `wanted` ones, those that a group with so many rewards does not need
    become `dropped`. Without such decisions, nothing changes.
    """
    tried = db.execute(
        "SELECT trajectory, (SELECT reason FROM failures f WHERE f.trajectory = t.trajectory ORDER BY id DESC LIMIT 1) "
        f"FROM trajectories t WHERE {NOT_ENDED} AND trajectory IN "
        "(SELECT trajectory FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > ?)",
        (retries,),
    )
    for trajectory, reason in tried.fetchall():
        failed(db, trajectory, reason, at)
    if wanted:
        _drop_surplus(db, wanted, at)
    half_filtered = db.execute(
        "SELECT trajectory, (SELECT error FROM trajectories f WHERE f.group_id = t.group_id AND f.state = 'filtered') "
        "FROM trajectories t WHERE state = 'scored' AND group_id IN "
        "(SELECT group_id FROM trajectories WHERE state = 'filtered')"
    )
    for trajectory, reason in half_filtered.fetchall():
        filtered(db, trajectory, reason or "", at)
    if drops:
        past = db.execute(
            "SELECT trajectory, SUM(num_sampled) FROM trajectories t JOIN groups USING (group_id) "
            f"LEFT JOIN completions USING (trajectory) WHERE {NOT_ENDED} AND state <> 'training' "
            "AND (deadline <= (SELECT MAX(update_id) FROM updates) OR ? IN (SELECT update_id FROM updates)) "
            "GROUP BY trajectory",
            (last_update,),
        )
        reason = "past its age limit" if last_update is None else "in reserve, and not needed"
        for trajectory, num_sampled in past.fetchall():
            dropped(db, trajectory, reason, at, num_sampled)
    _settle_losses(db, at)


def _settle_losses(db: sqlite3.Connection, at: float) -> None:
    """Completes what is recorded of lost groups of several tasks: the loss without its ends, or the ends alone."""
    unfinished = db.execute(
        "SELECT trajectory, SUM(num_sampled) FROM trajectories JOIN groups USING (group_id) "
        f"LEFT JOIN completions USING (trajectory) WHERE lost_before IS NOT NULL AND {NOT_ENDED} GROUP BY trajectory"
    )
    for trajectory, num_sampled in unfinished.fetchall():
        dropped(db, trajectory, "counted as lost", at, num_sampled)
    if db.execute("SELECT 1 FROM run WHERE key = 'order' AND value = '\"mixed\"'").fetchone():
        db.execute(
            "UPDATE groups SET lost_before = (SELECT COUNT(*) FROM groups) WHERE lost_before IS NULL AND group_id NOT "
            "IN (SELECT group_id FROM trajectories WHERE state NOT IN ('failed', 'filtered', 'dropped'))"
        )


def _drop_surplus(db: sqlite3.Connection, wanted: int, at: float) -> None:
    """Drops what groups with enough rewards do not need: what has no reward, and what was scored after the others."""
    rows = db.execute(
        "SELECT group_id, trajectory, state, (SELECT MAX(seq) FROM transitions s WHERE s.trajectory = t.trajectory "
        "AND s.to_state = 'scored'), (SELECT SUM(num_sampled) FROM completions c WHERE c.trajectory = t.trajectory) "
        "FROM trajectories t WHERE state NOT IN ('failed', 'dropped') AND group_id IN (SELECT group_id FROM "
        f"trajectories WHERE {NOT_ENDED}) ORDER BY group_id, trajectory"
    )
    members: dict[int, list[tuple[int, str, int, int | None]]] = {}
    for group, *member in rows.fetchall():
        members.setdefault(group, []).append((member[0], member[1], member[2] or 0, member[3]))
    for own in members.values():
        chosen = [each for each in own if each[1] in ("training", "trained", "filtered")]
        scored = sorted((each for each in own if each[1] == "scored"), key=lambda each: each[2])
        kept = {each[0] for each in [*chosen, *scored][: max(wanted, len(chosen))]}
        if len(kept) < wanted:
            continue
        for trajectory, _, _, num_sampled in own:
            if trajectory not in kept:
                dropped(db, trajectory, f"surplus: {len(kept)} others of its group were scored first", at, num_sampled)
