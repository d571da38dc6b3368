"""The answers of a judge and what they have cost, in `RUN/judge.sqlite`.

One file serves all judges of a run. An answer is found again by a digest of all that determines it. Costs are counted
for each judge by its name (its address and model), over all sessions of a run.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FILE = "judge.sqlite"
BUSY_S = 30.0  # for another process that writes
RETRY_S = 0.02

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY,  -- digest of the address and the whole request
    judge TEXT NOT NULL,
    text TEXT NOT NULL,
    input_tokens INTEGER,
    output_tokens INTEGER,
    at REAL NOT NULL  -- Unix time
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spending (
    judge TEXT PRIMARY KEY,
    calls INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a judge, with its length as the judge counts it; None: it does not say."""

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None  # why it ended; not kept


@dataclass(slots=True)
class Spent:
    """The costs so far."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class Limits(Protocol):
    """The limits of a budget; None: there is none."""

    @property
    def calls(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def dollars(self) -> float | None: ...
    @property
    def input_price(self) -> float | None: ...
    @property
    def output_price(self) -> float | None: ...


def exhausted(spent: Spent, limits: Limits) -> str | None:
    """Returns the limit that is reached, and what was used of it; None: none is."""
    tokens = spent.input_tokens + spent.output_tokens
    if limits.calls is not None and spent.calls >= limits.calls:
        return f"`calls = {limits.calls}`: {spent.calls:,} calls were answered"
    if limits.tokens is not None and tokens >= limits.tokens:
        return f"`tokens = {limits.tokens}`: {tokens:,} tokens were used"
    if limits.dollars is not None:
        cost = spent.input_tokens * (limits.input_price or 0.0) + spent.output_tokens * (limits.output_price or 0.0)
        if cost / 1e6 >= limits.dollars:
            return f"`dollars = {limits.dollars:g}`: {cost / 1e6:.2f} dollars were used"
    return None


def key_of(address: str, body: Mapping[str, Any]) -> str:
    """Returns the key of an answer: a digest of all that determines it."""
    text = json.dumps([address, body], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _use_wal(db: sqlite3.Connection) -> None:
    """Switches to a write-ahead log. Waits if another judge is making the file just now: SQLite itself does not."""
    ends = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
            time.sleep(RETRY_S)


class JudgeRecord:
    """The record of one judge. With `path` None it lasts as long as the process. Raises `sqlite3.Error`."""

    def __init__(self, path: Path | None, judge: str, *, keeps_answers: bool) -> None:
        self._judge = judge
        self._keeps_answers = keeps_answers
        self._db = sqlite3.connect(":memory:" if path is None else path, timeout=BUSY_S, isolation_level=None)
        _use_wal(self._db)
        self._db.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may cost the last answers
        self._db.executescript(_TABLES)
        row = self._db.execute(
            "SELECT calls, input_tokens, output_tokens FROM spending WHERE judge = ?", (judge,)
        ).fetchone()
        self.spent = Spent(*(row or (0, 0, 0)))

    def find(self, key: str) -> Answer | None:
        """Returns the answer that is kept under a key."""
        if not self._keeps_answers:
            return None
        row = self._db.execute("SELECT text, input_tokens, output_tokens FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else Answer(*row)

    def add(self, key: str, answer: Answer) -> None:
        """Keeps an answer, and counts what it cost."""
        self._db.execute("BEGIN IMMEDIATE")
        if self._keeps_answers:
            self._db.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                (key, self._judge, answer.text, answer.input_tokens, answer.output_tokens, time.time()),
            )
        row = self._db.execute(  # other processes may ask the same judge
            "INSERT INTO spending VALUES (?, 1, ?, ?) ON CONFLICT (judge) DO UPDATE SET calls = calls + 1, "
            "input_tokens = input_tokens + excluded.input_tokens, "
            "output_tokens = output_tokens + excluded.output_tokens RETURNING calls, input_tokens, output_tokens",
            (self._judge, answer.input_tokens or 0, answer.output_tokens or 0),
        ).fetchone()
        self._db.execute("COMMIT")
        spent = self.spent
        spent.calls, spent.input_tokens, spent.output_tokens = row

    def close(self) -> None:
        self._db.close()
