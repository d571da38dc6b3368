"""The journal: a durable record of every state change of every trajectory. `schema.py` documents its tables.

Each change is declared once, as a function in `run_writes.py`, `trajectory_writes.py`, `update_writes.py` or
`settle_writes.py`. `Journal` has a method of the same name and parameters (without `db`), which appends a call of it to
a list. The writer's thread (`writer.py`) makes the call later, in the transaction of the changes around it. `at` is the
time of the change, in seconds since 1970. A change that contradicts the journal (a second end, a completion of a
trajectory that was never admitted) is an error.

Two changes must be on disk before the run continues, and the loop awaits `durable()` for both: the members of a batch
before it trains, and the checksum of a version before its first token. In `await room()` the loop waits for a slow
disk, with a deadline.

The file itself enforces exactly-once: (trajectory, lineage, use) is unique among the members of batches, an end is
final, and a completion is written once. The state of a killed run is rebuilt from its journal (`run/recovery.py`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

from stretto.errors import JournalError, RunError
from stretto.store import run_writes, settle_writes, trajectory_writes, update_writes
from stretto.store.lock import Lock
from stretto.store.reader import JournalReader as JournalReader
from stretto.store.schema import (
    JOURNAL_NAME,
    RESERVES,
    RESTORE,
    SCHEMA,
    SCHEMA_VERSION,
    RunFacts,
    check_schema,
)
from stretto.store.writer import Writer
from stretto.types import RewardPart

__all__ = ["JOURNAL_NAME", "Journal", "JournalReader", "RunFacts"]

WAIT_S = 60.0  # a disk that is slower than this ends the run


P = ParamSpec("P")


def _recorded(write: Callable[Concatenate[sqlite3.Connection, P], None]) -> Callable[Concatenate[Journal, P], None]:
    """Returns the method of the journal that records a call of `write`, with the same parameters."""

    def record(journal: Journal, /, *args: P.args, **kwargs: P.kwargs) -> None:
        journal._writer.queue((write, args, kwargs))

    record.__name__, record.__doc__ = write.__name__, write.__doc__
    return record


class Journal:
    """Records the changes of a run. Methods are thread-safe and never block on the disk.

    Arguments (arrays, lists, mappings) must not change after the call: they are encoded later. Every method raises
    `JournalError`, which names the file and the cause, after anything could not be written.
    """

    def __init__(self, path: Path, lock: Lock, stored: RunFacts | None, interval_s: float, capacity: int) -> None:
        self.path = path
        self._lock = lock
        self._stored = stored
        self._has_session = False
        self._writer = Writer(path, interval_s=interval_s, capacity=capacity)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        resume: bool = False,
        lock: Lock | None = None,
        interval_s: float = 0.05,
        capacity: int = 8192,
    ) -> Journal:
        """Creates the journal at `path`, or with `resume` opens the existing one. One process at a time.

        `lock` is the run's lock, if the caller has taken it already; it is closed with the journal.
        """
        path = Path(path)
        if resume and not path.exists():
            raise RunError(f"`{path}` does not exist: there is nothing to resume")
        if not resume and path.exists():
            raise RunError(f"`{path}` exists already: resume that run, or choose another folder")
        try:
            lock = lock or Lock(path)
        except OSError as error:
            raise JournalError(f"journal `{path}` cannot be opened: {error}") from error
        try:
            return cls(path, lock, _prepare(path), interval_s, capacity)
        except sqlite3.Error as error:
            lock.close()
            hint = "" if isinstance(error, sqlite3.OperationalError) else f"; {RESTORE}"
            raise JournalError(f"journal `{path}` cannot be opened: {error}{hint}") from error
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backlog(self) -> int:
        """Changes recorded and not yet committed."""
        return self._writer.backlog

    async def durable(self, timeout_s: float = WAIT_S) -> None:
        """Waits until everything recorded so far is on disk; commits at once."""
        await self._writer.durable(timeout_s)

    def flush(self, timeout_s: float = WAIT_S) -> None:
        """Does the same as `durable` for callers without an event loop; blocks."""
        self._writer.flush(timeout_s)

    async def room(self, timeout_s: float = WAIT_S) -> None:
        """Waits until the queue has room. Normally returns at once."""
        await self._writer.room(timeout_s)

    def close(self) -> None:
        """Writes what is left and stops the writer; blocks. Safe to call twice."""
        try:
            self._writer.close()
        finally:
            self._lock.close()

    def begin(self, facts: RunFacts, at: float, recipe: str | None = None) -> None:
        """Starts a session. A resumed run calls it only when nothing can refuse it any more.

        With a `recipe` (TOML), a new phase of the run begins with the next update.
        """
        self.refuse_another_run(facts)
        self._writer.record(run_writes.begin, facts, at, recipe)
        self._has_session = True

    def ended_by(self, error: str | None, at: float) -> None:
        """Ends the session of this process by an error, or by an interrupt (None), unless it has ended or never began.

        A session that was interrupted counts as stopped.
        """
        if self._has_session:  # otherwise the last session is that of another process
            self._writer.record(run_writes.ended_by, error, at)

    def refuse_another_run(self, facts: RunFacts) -> None:
        """Raises `RunError` if a resumed run has another paradigm, batch, group, redundancy, seed or data."""
        for name in ("paradigm", "batch", "group", *RESERVES, "seed", "data_rows", "dropped_rows", "order"):
            if self._stored is not None and getattr(self._stored, name) != getattr(facts, name):
                raise RunError(
                    f"`{name} = {getattr(facts, name)!r}` cannot resume `{self.path}`, which was recorded with "
                    f"`{getattr(self._stored, name)!r}`: use that, or start a new run"
                )

    def scored(
        self,
        trajectory: int,
        reward: float,
        at: float,
        turns: tuple[float, ...] | None = None,
        parts: tuple[RewardPart, ...] | None = None,
    ) -> None:
        """Gives a trajectory its reward, a finite number, and the rewards of its turns or its parts if it has them."""
        if not math.isfinite(reward):
            raise JournalError(f"trajectory {trajectory} cannot be scored with {reward}: a reward is a finite number")
        self._writer.record(trajectory_writes.scored, trajectory, reward, at, turns, parts)

    # One line for each other change. Its parameters and its documentation are those of the function.
    based_on = _recorded(run_writes.based_on)
    scored_by = _recorded(run_writes.scored_by)
    read_from = _recorded(run_writes.read_from)
    finished = _recorded(run_writes.finished)
    settle = _recorded(settle_writes.settle)

    version_published = _recorded(run_writes.version_published)
    version_made_again = _recorded(run_writes.version_made_again)
    version_loaded = _recorded(run_writes.version_loaded)
    receipt_given = _recorded(run_writes.receipt_given)

    group_admitted = _recorded(trajectory_writes.group_admitted)
    group_lost = _recorded(trajectory_writes.group_lost)
    group_spared = _recorded(trajectory_writes.group_spared)

    state_changed = _recorded(trajectory_writes.state_changed)
    attempt_failed = _recorded(trajectory_writes.attempt_failed)
    generated = _recorded(trajectory_writes.generated)
    episode_limited = _recorded(trajectory_writes.episode_limited)
    score_again = _recorded(trajectory_writes.score_again)
    failed = _recorded(trajectory_writes.failed)
    filtered = _recorded(trajectory_writes.filtered)
    dropped = _recorded(trajectory_writes.dropped)
    trajectory_moved = _recorded(trajectory_writes.trajectory_moved)

    batch_taken = _recorded(update_writes.batch_taken)
    update_done = _recorded(update_writes.update_done)
    routing_forgotten = _recorded(update_writes.routing_forgotten)
    token_values = _recorded(update_writes.token_values)
    evaluation = _recorded(update_writes.evaluation)

    instance_joined = _recorded(run_writes.instance_joined)
    instance_left = _recorded(run_writes.instance_left)

    note = _recorded(run_writes.note)
    status = _recorded(run_writes.status)


# -- opening -----------------------------------------------------------------------------------------------------------


def _prepare(path: Path) -> RunFacts | None:
    """Creates the tables, or checks existing ones. Returns the facts of a run that is resumed."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():  # new, or killed at its start
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT")
            return None
        check_schema(connection, path)
        with JournalReader(path) as reader:
            return reader.facts() if reader.has_begun() else None
    finally:
        connection.close()
