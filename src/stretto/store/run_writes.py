"""The changes that a journal records of the run itself: sessions, versions, instances, notes."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from stretto import __version__
from stretto.errors import JournalError
from stretto.store.blobs import json_or_null, storable
from stretto.store.schema import Departure, RunFacts
from stretto.types import Receipt

_LAST = "COALESCE((SELECT MAX(seq) FROM transitions), 0)"
_SESSION = "(SELECT MAX(session) FROM sessions)"


# -- sessions ----------------------------------------------------------------------------------------------------------


def begin(db: sqlite3.Connection, facts: RunFacts, at: float, recipe: str | None = None) -> None:
    """Starts a session with the facts of the run. With a `recipe`, a phase begins with the next update."""
    values = {**dataclasses.asdict(facts), "stretto_version": __version__}
    db.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])
    db.execute("INSERT INTO sessions (started_at) VALUES (?)", (at,))
    if recipe is not None:
        db.execute(
            "INSERT INTO phases SELECT (SELECT COUNT(*) FROM phases), (SELECT COUNT(finished_at) FROM updates), "
            "(SELECT COUNT(*) FROM groups), ?, ?, ?",
            (at, json.dumps(dataclasses.asdict(facts)), storable(recipe)),
        )


def based_on(db: sqlite3.Connection, checksum: str) -> None:
    """Records the checksum of the base model that the adapters of a LoRA run belong to."""
    db.execute("INSERT OR REPLACE INTO run VALUES ('base', ?)", (json.dumps(checksum),))


def scored_by(db: sqlite3.Connection, sources: Mapping[str, str]) -> None:
    """Records the digests of the source files that score the task from now on."""
    db.execute("INSERT OR REPLACE INTO run VALUES ('sources', ?)", (json_or_null(sources),))


def read_from(db: sqlite3.Connection, data: Mapping[str, Any]) -> None:
    """Records what the prompts are made from: `train` and `evaluation`, digests by name, and `chat_template`.

    The last is the text of the template that the recipe asks for, or None.
    """
    db.execute("INSERT OR REPLACE INTO run VALUES ('data', ?)", (json_or_null(data),))


def finished(db: sqlite3.Connection, stopped: bool, at: float, totals: Mapping[str, Any] | None = None) -> None:
    """Ends the session: all updates are done, or (`stopped`) the run was asked to stop. `totals` are its sums."""
    db.execute(
        f"UPDATE sessions SET ended_at = ?, outcome = ?, totals = ? WHERE session = {_SESSION}",
        (at, "stopped" if stopped else "finished", json_or_null(totals)),
    )


def ended_by(db: sqlite3.Connection, error: str | None, at: float) -> None:
    """Ends the session by an error, or by an interrupt (None), unless it has ended already."""
    db.execute(
        f"UPDATE sessions SET ended_at = ?, outcome = ?, error = ? WHERE session = {_SESSION} AND outcome IS NULL",
        (at, "stopped" if error is None else "failed", error),
    )


# -- versions ----------------------------------------------------------------------------------------------------------


def version_published(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that a version exists, with the checksum of its weights."""
    db.execute(
        f"INSERT OR IGNORE INTO versions (version, checksum, published_at, published_after) VALUES (?, ?, ?, {_LAST})",
        (version, checksum, at),
    )
    _expect_checksum(db, version, checksum, "published")


def version_made_again(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that lost weights of a version were made again with other bits. The old checksum is kept too."""
    db.execute(
        "INSERT INTO remade SELECT update_id + 1, checksum, ? FROM updates WHERE update_id + 1 = ? AND checksum <> ?",
        (at, version, checksum),
    )
    db.execute("UPDATE updates SET checksum = ? WHERE update_id = ?", (checksum, version - 1))
    db.execute("UPDATE versions SET checksum = ? WHERE version = ?", (checksum, version))


def version_loaded(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that an engine confirmed the checksum of a version. The first time is kept."""
    db.execute(
        f"UPDATE versions SET loaded_at = ?, loaded_after = {_LAST} WHERE version = ? AND loaded_at IS NULL",
        (at, version),
    )
    _expect_checksum(db, version, checksum, "loaded")


def receipt_given(db: sqlite3.Connection, instance: int, receipt: Receipt, at: float) -> None:
    """Records the receipt of an engine that loaded a version."""
    db.execute(
        "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            receipt.id,
            instance,
            receipt.version,
            receipt.checksum,
            receipt.num_tokens,
            receipt.mean_difference,
            receipt.largest_difference,
            receipt.tolerance,
            receipt.served_by,
            at,
            receipt.layout,
            receipt.held,
        ),
    )


def _expect_checksum(db: sqlite3.Connection, version: int, checksum: str, what: str) -> None:
    recorded = db.execute("SELECT checksum FROM versions WHERE version = ?", (version,)).fetchone()
    if recorded != (checksum,):
        was = recorded[0] if recorded else "never published"
        raise JournalError(f"version {version} was {what} with checksum {checksum}, but is recorded as {was}")


# -- instances and notes -----------------------------------------------------------------------------------------------


def instance_joined(db: sqlite3.Connection, instance: int, slots: int, at: float) -> None:
    """Records an instance that takes part in this session, with its version slots."""
    db.execute(
        f"INSERT INTO instances (session, instance, slots, joined_at) VALUES ({_SESSION}, ?, ?, ?)",
        (instance, slots, at),
    )


def instance_left(db: sqlite3.Connection, instance: int, outcome: Departure, reason: str, at: float) -> None:
    """Records that an instance takes part no more."""
    db.execute(
        f"UPDATE instances SET left_at = ?, outcome = ?, reason = ? WHERE session = {_SESSION} AND instance = ?",
        (at, outcome, storable(reason), instance),
    )


def note(db: sqlite3.Connection, kind: str, text: str, at: float) -> None:
    """Records something for a person to read: a wait, a failed attempt to write a checkpoint."""
    db.execute("INSERT INTO notes (at, kind, text) VALUES (?, ?, ?)", (at, kind, storable(text)))


def status(db: sqlite3.Connection, state: Mapping[str, Any], at: float) -> None:
    """Replaces the record of what the run does now, and who waits for what."""
    db.execute("INSERT OR REPLACE INTO status VALUES (0, ?, ?)", (at, storable(json.dumps(dict(state)))))
