"""What the writer's thread does: one function a change, each inside the transaction of the changes around it.

Whatever cannot be recorded truthfully (an end after an end, a completion of something never admitted) is an error.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto import __version__
from stretto.errors import JournalError
from stretto.store.schema import ENDS, Attempt, Departure, EvaluationKind, RunFacts, State
from stretto.types import Completion, Prompt

_NOT_ENDED = f"state NOT IN {ENDS!r}"
_LAST = "COALESCE((SELECT MAX(seq) FROM transitions), 0)"


def blob(values: Sequence[int] | NDArray[Any], kind: str) -> bytes:
    """Little-endian bytes of `kind` (`<i4`, `<f4`)."""
    return np.ascontiguousarray(values, dtype=kind).tobytes()


def storable(text: str) -> str:
    """`text` as SQLite can hold it: half a surrogate pair is no UTF-8, and no reason to stop a run."""
    return text.encode("utf-8", "replace").decode("utf-8")


def begin(db: sqlite3.Connection, facts: RunFacts, at: float) -> None:
    values = {**dataclasses.asdict(facts), "laws_broken": facts.laws_broken, "stretto_version": __version__}
    db.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])
    db.execute("INSERT INTO sessions (started_at) VALUES (?)", (at,))


def based_on(db: sqlite3.Connection, checksum: str) -> None:
    db.execute("INSERT OR REPLACE INTO run VALUES ('base', ?)", (json.dumps(checksum),))


def finished(db: sqlite3.Connection, stopped: bool, totals: dict[str, Any] | None, at: float) -> None:
    db.execute(
        "UPDATE sessions SET ended_at = ?, outcome = ?, totals = ? WHERE session = (SELECT MAX(session) FROM sessions)",
        (at, "stopped" if stopped else "finished", None if totals is None else json.dumps(totals)),
    )


def settle(db: sqlite3.Connection, retries: int, drops: bool, at: float) -> None:
    """Carry out to its end what the core had decided and only part of was recorded."""
    tried = db.execute(
        "SELECT trajectory, (SELECT reason FROM failures f WHERE f.trajectory = t.trajectory ORDER BY id DESC LIMIT 1) "
        f"FROM trajectories t WHERE {_NOT_ENDED} AND trajectory IN "
        "(SELECT trajectory FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > ?)",
        (retries,),
    )
    for trajectory, reason in tried.fetchall():
        ended(db, trajectory, "failed", reason, at)
    half_filtered = db.execute(
        "SELECT trajectory, (SELECT error FROM trajectories f WHERE f.group_id = t.group_id AND f.state = 'filtered') "
        "FROM trajectories t WHERE state = 'scored' AND group_id IN "
        "(SELECT group_id FROM trajectories WHERE state = 'filtered')"
    )
    for trajectory, reason in half_filtered.fetchall():
        ended(db, trajectory, "filtered", reason or "", at)
    if drops:
        past = db.execute(
            "SELECT trajectory, num_sampled FROM trajectories t JOIN groups USING (group_id) LEFT JOIN completions "
            f"USING (trajectory) WHERE {_NOT_ENDED} AND state <> 'training' "
            "AND deadline <= (SELECT MAX(update_id) FROM updates)"
        )
        for trajectory, num_sampled in past.fetchall():
            ended(db, trajectory, "dropped", "past its age limit", at, num_sampled)


def version_published(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    db.execute(
        f"INSERT OR IGNORE INTO versions (version, checksum, published_at, published_after) VALUES (?, ?, ?, {_LAST})",
        (version, checksum, at),
    )
    _expect_checksum(db, version, checksum, "published")


def version_made_again(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    db.execute(
        "INSERT INTO remade SELECT update_id + 1, checksum, ? FROM updates WHERE update_id + 1 = ? AND checksum <> ?",
        (at, version, checksum),
    )
    db.execute("UPDATE updates SET checksum = ? WHERE update_id = ?", (checksum, version - 1))
    db.execute("UPDATE versions SET checksum = ? WHERE version = ?", (checksum, version))


def version_loaded(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    db.execute(
        f"UPDATE versions SET loaded_at = ?, loaded_after = {_LAST} WHERE version = ? AND loaded_at IS NULL",
        (at, version),
    )
    _expect_checksum(db, version, checksum, "loaded")


def _expect_checksum(db: sqlite3.Connection, version: int, checksum: str, what: str) -> None:
    recorded = db.execute("SELECT checksum FROM versions WHERE version = ?", (version,)).fetchone()
    if recorded != (checksum,):
        was = recorded[0] if recorded else "never published"
        raise JournalError(f"version {version} was {what} with checksum {checksum}, and is recorded as {was}")


def group_admitted(
    db: sqlite3.Connection,
    group: int,
    version: int,
    deadline: int,
    staleness: int,
    prompt: Prompt,
    epoch: int | None,
    row_number: int,
    draw: str,
    trajectories: Sequence[int],
    seeds: Sequence[int],
    at: float,
    instance: int | None,
) -> None:
    tokens = blob(prompt.tokens, "<i4")
    row = json.dumps(dict(prompt.row), default=str)  # for people: a resumed run draws its prompts from the task
    db.execute(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
        (
            group,
            epoch,
            prompt.index,
            row_number,
            version,
            deadline,
            staleness,
            storable(prompt.text),
            tokens,
            row,
            at,
            draw,
        ),
    )
    db.executemany(
        "INSERT INTO trajectories (trajectory, group_id, member, version, seed, state, instance) "
        "VALUES (?, ?, ?, ?, ?, 'running', ?)",
        [
            (trajectory, group, member, version, seed, instance)
            for member, (trajectory, seed) in enumerate(zip(trajectories, seeds, strict=True))
        ],
    )
    db.executemany(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) VALUES (?, NULL, 'running', ?, '')",
        [(trajectory, at) for trajectory in trajectories],
    )


def _change_state(db: sqlite3.Connection, trajectory: int, to_state: State, at: float, reason: str = "") -> None:
    """Record a transition from whatever the state is. An end is final."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
        f"SELECT trajectory, state, ?, ?, ? FROM trajectories WHERE trajectory = ? AND {_NOT_ENDED}",
        (to_state, at, storable(reason), trajectory),
    )
    if added.rowcount != 1:
        found = db.execute("SELECT state FROM trajectories WHERE trajectory = ?", (trajectory,)).fetchone()
        was = "was never admitted" if found is None else f"has already ended as `{found[0]}`"
        raise JournalError(f"trajectory {trajectory} {was} and cannot become `{to_state}`")
    db.execute("UPDATE trajectories SET state = ? WHERE trajectory = ?", (to_state, trajectory))


def _change_members(db: sqlite3.Connection, update: int, to_state: State, at: float, only: str = "") -> int:
    """`_change_state` for the whole batch of an update, in its order and in two statements; how many it changed."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) SELECT t.trajectory, t.state, ?, ?, '' "
        "FROM members m JOIN trajectories t USING (trajectory) "
        f"WHERE m.update_id = ? AND m.use = 0 AND t.{_NOT_ENDED} {only} ORDER BY m.position",
        (to_state, at, update),
    )
    db.execute(
        f"UPDATE trajectories AS t SET state = ? WHERE t.{_NOT_ENDED} {only} AND t.trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (to_state, update),
    )
    return added.rowcount


def moved(
    db: sqlite3.Connection,
    trajectory: int,
    to_state: State,
    at: float,
    reason: str,
    instance: int | None,
) -> None:
    _change_state(db, trajectory, to_state, at, reason)
    db.execute("UPDATE trajectories SET instance = COALESCE(?, instance) WHERE trajectory = ?", (instance, trajectory))


def attempt_failed(db: sqlite3.Connection, trajectory: int, kind: Attempt, reason: str, at: float) -> None:
    db.execute(
        "INSERT INTO failures (trajectory, kind, at, reason) VALUES (?, ?, ?, ?)",
        (trajectory, kind, at, storable(reason)),
    )


def generated(db: sqlite3.Connection, trajectory: int, completion: Completion, text: str, at: float) -> None:
    _change_state(db, trajectory, "scoring", at)
    versions, supports, turns = completion.token_versions, completion.supports, completion.turns
    db.execute(
        "INSERT INTO completions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            trajectory,
            completion.version,
            completion.checksum,
            len(completion.tokens),
            completion.finish,
            completion.started_at,
            completion.finished_at,
            completion.prefilled,
            storable(text),
            blob(completion.tokens, "<i4"),
            blob(completion.logprobs, "<f4"),
            None if versions is None else blob(versions, "<i4"),
            None if supports is None else blob(supports.counts, "<i4") + blob(supports.tokens, "<i4"),
            completion.num_sampled,
            None if turns is None else blob(turns, "<i4"),
        ),
    )


def scored(db: sqlite3.Connection, trajectory: int, reward: float, at: float, turns: tuple[float, ...] | None) -> None:
    _change_state(db, trajectory, "scored", at)
    by_turn = None if turns is None else np.asarray(turns, dtype="<f8").tobytes()
    db.execute(
        "UPDATE trajectories SET reward = ?, scored_at = ?, turn_rewards = ? WHERE trajectory = ?",
        (float(reward), at, by_turn, trajectory),
    )


def ended(
    db: sqlite3.Connection, trajectory: int, end: State, reason: str, at: float, lost_tokens: int | None = None
) -> None:
    _change_state(db, trajectory, end, at, reason)
    db.execute(
        "UPDATE trajectories SET ended_at = ?, error = ?, lost_tokens = ? WHERE trajectory = ?",
        (at, storable(reason) or None, lost_tokens, trajectory),
    )


def group_spared(db: sqlite3.Connection, group: int, update: int, text: str, at: float) -> None:
    db.execute("UPDATE groups SET spared = ? WHERE group_id = ?", (update, group))
    note(db, "filter limit", text, at)


def batch_taken(
    db: sqlite3.Connection, update: int, trajectories: Sequence[int], uses: Sequence[int], at: float
) -> None:
    taken = db.execute(
        "SELECT trajectory, use FROM members WHERE update_id = ? ORDER BY position", (update,)
    ).fetchall()
    if taken:  # before the run was killed
        if taken != list(zip(trajectories, uses, strict=True)):
            raise JournalError(f"update {update} is to train another batch than the one that was recorded")
        return
    db.execute("INSERT INTO updates (update_id, taken_at) VALUES (?, ?)", (update, at))
    db.executemany(
        "INSERT INTO members VALUES (?, ?, ?, ?)",
        [(update, position, *member) for position, member in enumerate(zip(trajectories, uses, strict=True))],
    )
    first_uses = [trajectory for trajectory, use in zip(trajectories, uses, strict=True) if use == 0]
    if _change_members(db, update, "training", at) != len(first_uses):
        for trajectory in first_uses:  # says which one cannot
            _change_state(db, trajectory, "training", at)


def update_done(
    db: sqlite3.Connection,
    update: int,
    metrics: dict[str, Any],
    checksum: str | None,
    totals: dict[str, Any] | None,
    at: float,
) -> None:
    done = db.execute(
        "UPDATE updates SET finished_at = ?, metrics = ?, checksum = ?, totals = ? WHERE update_id = ?",
        (at, json.dumps(metrics), checksum, None if totals is None else json.dumps(totals), update),
    )
    if done.rowcount != 1:
        raise JournalError(f"update {update} is done and its batch was never recorded")
    _change_members(db, update, "trained", at, only="AND t.state = 'training'")
    db.execute(
        "UPDATE trajectories SET ended_at = ? WHERE state = 'trained' AND ended_at IS NULL AND trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (at, update),
    )


def evaluation(
    db: sqlite3.Connection,
    version: int,
    kind: EvaluationKind,
    at: float,
    reward: float | None,
    num: int,
    seconds: float,
    line: dict[str, Any] | None,
) -> None:
    db.execute(
        "INSERT INTO evaluations (version, kind, at, reward, num, seconds, line) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (version, kind, at, reward, num, seconds, None if line is None else json.dumps(line)),
    )


_SESSION = "(SELECT MAX(session) FROM sessions)"


def instance_joined(db: sqlite3.Connection, instance: int, slots: int, at: float) -> None:
    db.execute(
        f"INSERT INTO instances (session, instance, slots, joined_at) VALUES ({_SESSION}, ?, ?, ?)",
        (instance, slots, at),
    )


def instance_left(db: sqlite3.Connection, instance: int, outcome: Departure, reason: str, at: float) -> None:
    db.execute(
        f"UPDATE instances SET left_at = ?, outcome = ?, reason = ? WHERE session = {_SESSION} AND instance = ?",
        (at, outcome, storable(reason), instance),
    )


def carried(
    db: sqlite3.Connection,
    trajectory: int,
    version: int,
    source: int | None,
    target: int,
    context: int,
    num_bytes: int,
    prefilled: int,
    reason: str,
    at: float,
) -> None:
    db.execute(
        "INSERT INTO moves (at, trajectory, version, source, target, context, num_bytes, prefilled, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (at, trajectory, version, source, target, context, num_bytes, prefilled, reason),
    )


def note(db: sqlite3.Connection, kind: str, text: str, at: float) -> None:
    db.execute("INSERT INTO notes (at, kind, text) VALUES (?, ?, ?)", (at, kind, storable(text)))
