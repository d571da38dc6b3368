"""The changes that a journal records of updates and evaluations."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.errors import JournalError
from stretto.store.answer_writes import write_answers
from stretto.store.blobs import blob, json_or_null
from stretto.store.digests import sample_digest, untrained_digest, update_digest
from stretto.store.routing_files import remove_records, run_folder, sync_records
from stretto.store.schema import ENDS, FAILURES_OF_MEMBERS, PHASES, UNTRAINED_OF_MEMBERS, EvaluationKind
from stretto.store.transition_writes import change_members, change_state
from stretto.types import HeldOutAnswer, Sample, TokenReport


def batch_taken(
    db: sqlite3.Connection,
    update: int,
    trajectories: Sequence[int],
    at: float,
    uses: Sequence[int] | None = None,
    lineages: Sequence[int] | None = None,
) -> None:
    """Makes these trajectories, in this order, the batch of `update`. Await `durable()` before it trains.

    A trajectory comes once for each of its `lineages` that is trained; None means that each has lineage 0 alone. `uses`
    is 0 for a trajectory that is trained for the first time, and counts up each time it is used again; None means all
    0. If a killed run had recorded the same batch, nothing changes; another batch is an error.
    """
    uses, lineages = uses or (0,) * len(trajectories), lineages or (0,) * len(trajectories)
    members = list(zip(trajectories, uses, lineages, strict=True))
    taken = _members(db, update)
    if taken:
        if taken != members:
            raise JournalError(f"update {update} has a recorded batch, and is about to train another one")
        return
    if routed := _routed(db, "trajectory IN (SELECT value FROM json_each(?))", json.dumps(list(trajectories))):
        sync_records(run_folder(db), routed)
    db.execute("INSERT INTO updates (update_id, taken_at) VALUES (?, ?)", (update, at))
    db.executemany(
        "INSERT INTO members (update_id, position, trajectory, use, lineage) VALUES (?, ?, ?, ?, ?)",
        [(update, position, *member) for position, member in enumerate(members)],
    )
    first_uses = list(dict.fromkeys(trajectory for trajectory, use, _ in members if use == 0))
    if change_members(db, update, "training", at) != len(first_uses):
        for trajectory in first_uses:  # raises for the one that has ended
            change_state(db, trajectory, "training", at)


def remove_batch(db: sqlite3.Connection, trajectory: int, at: float) -> None:
    """Removes the batch of a trajectory that was taken and not trained. Its members are `scored` again."""
    (update,) = db.execute(
        "SELECT update_id FROM members JOIN updates USING (update_id) "
        "WHERE trajectory = ? AND use = 0 AND finished_at IS NULL",
        (trajectory,),
    ).fetchone()
    reason = f"the batch of update {update} is taken again"
    db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
        "SELECT trajectory, state, 'scored', ?, ? FROM members JOIN trajectories USING (trajectory) "
        "WHERE update_id = ? AND use = 0 GROUP BY trajectory ORDER BY MIN(position)",
        (at, reason, update),
    )
    db.execute(
        "UPDATE trajectories SET state = 'scored' WHERE trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (update,),
    )
    db.execute("DELETE FROM members WHERE update_id = ?", (update,))
    db.execute("DELETE FROM updates WHERE update_id = ?", (update,))


def routing_forgotten(db: sqlite3.Connection, before: int | None) -> None:
    """Deletes the records of routing of trajectories that have ended and whose last update is before `before`.

    None: of all. The journal keeps their stamps.
    """
    trained = (
        ""
        if before is None
        else (
            " AND COALESCE((SELECT MAX(update_id) FROM members m WHERE m.trajectory = c.trajectory), -1) < ?"
            f" AND (SELECT state FROM trajectories t WHERE t.trajectory = c.trajectory) IN {ENDS}"
        )
    )
    if routed := _routed(db, f"1{trained}", *(() if before is None else (before,))):
        remove_records(run_folder(db), routed)


def _routed(db: sqlite3.Connection, where: str, *args: object) -> list[tuple[int, int]]:
    """Returns trajectory and lineage of the completions with a record of routing."""
    query = f"SELECT trajectory, lineage FROM completions c WHERE routing IS NOT NULL AND {where}"
    return db.execute(query, args).fetchall()


def _members(db: sqlite3.Connection, update: int) -> list[tuple[int, int, int]]:
    """Returns trajectory, use and lineage of the members of a batch, in order."""
    query = "SELECT trajectory, use, lineage FROM members WHERE update_id = ? ORDER BY position"
    return db.execute(query, (update,)).fetchall()


def update_done(
    db: sqlite3.Connection,
    update: int,
    metrics: Mapping[str, Any],
    at: float,
    checksum: str | None = None,
    totals: Mapping[str, Any] | None = None,
    samples: Sequence[Sample] | None = None,
    advantages: str | None = None,
) -> None:
    """Finishes `update`: every member of its batch ends as `trained`.

    `checksum` is that of the weights that it made, version `update + 1`; `totals` are the sums of the run. `samples`
    are those that the trainer was given, whose digest is recorded; `advantages` is the digest of their advantages.
    """
    row = (checksum, advantages, json_or_null(metrics), json_or_null(totals))
    done = db.execute(
        "UPDATE updates SET finished_at = ?, checksum = ?, advantages = ?, metrics = ?, totals = ? WHERE update_id = ?",
        (at, *row, update),
    )
    if done.rowcount != 1:
        raise JournalError(f"update {update} is done, but its batch was never recorded")
    if samples is not None:
        _seal(db, update, samples, row)
    change_members(db, update, "trained", at, only="AND t.state = 'training'")
    db.execute(
        "UPDATE trajectories SET ended_at = ? WHERE state = 'trained' AND ended_at IS NULL AND trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (at, update),
    )


def _seal(db: sqlite3.Connection, update: int, samples: Sequence[Sample], row: Sequence[str | None]) -> None:
    """Records the digests of what an update trained on. Raises `JournalError` if that is not its recorded batch."""
    members = [(sample.trajectory, sample.use, sample.lineage) for sample in samples]
    if _members(db, update) != members:
        raise JournalError(f"update {update} has a recorded batch, and has trained another one")
    before = db.execute("SELECT digest FROM updates WHERE update_id = ?", (update - 1,)).fetchone()
    failures = db.execute(FAILURES_OF_MEMBERS, (update, update)).fetchall()
    untrained = list(map(untrained_digest, db.execute(UNTRAINED_OF_MEMBERS, (update, update))))
    digests = b"".join(map(sample_digest, samples))
    digest = update_digest(
        before[0] if before else None, update, members, digests,
        failures=[each[1:] for each in failures], row=row, untrained=untrained,
        phases=db.execute(PHASES, (update, update)).fetchall(),
    )  # fmt: skip
    db.execute("UPDATE updates SET samples = ?, digest = ? WHERE update_id = ?", (digests, digest, update))


def evaluation(
    db: sqlite3.Connection,
    version: int,
    kind: EvaluationKind,
    at: float,
    reward: float | None = None,
    num: int = 0,
    seconds: float = 0.0,
    line: Mapping[str, Any] | None = None,
    answers: Sequence[HeldOutAnswer] = (),
) -> None:
    """Records an evaluation of `version` over `num` prompts with its mean reward, or that it was skipped.

    `line` is its line of `metrics.jsonl`.
    """
    added = db.execute(
        "INSERT INTO evaluations (version, kind, at, reward, num, seconds, line) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (version, kind, at, reward, num, seconds, json_or_null(line)),
    )
    write_answers(db, added.lastrowid or 0, answers)


def token_values(db: sqlite3.Connection, update: int, values: Sequence[TokenReport]) -> None:
    """Records what the trainer computed for the tokens of an update, by the position of their sample in the batch."""
    db.executemany(
        "INSERT OR REPLACE INTO token_values VALUES (?, ?, ?, ?, ?, ?)",
        [
            (
                update,
                each.position,
                *(blob(part, "<f4") for part in (each.logprobs, each.ratios, each.advantages, each.gradients)),
            )
            for each in values
        ],
    )
