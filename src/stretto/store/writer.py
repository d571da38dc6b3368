"""The thread that writes SQLite, so that no other thread waits for the disk.

    caller                          writer thread
    record(f, ...)    -- append --> collects for `interval_s`, then one transaction: f(connection, ...) ... COMMIT
    await durable()   <-- future -- commits at once, synced to disk
    await room()      <-- future -- when the backlog has fallen below `capacity`

Changes are applied in the order in which they were recorded, so after a crash the file holds a prefix of them. An
ordinary commit survives the end of the process; a commit that `durable` waited for also survives a power failure.
A change that fails ends the writer: its transaction is rolled back, and every later call raises `JournalError`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from stretto.errors import JournalError

P = ParamSpec("P")
Change = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]  # function, its arguments after the connection
LOCKED_TIMEOUT_S = 15.0  # how long SQLite waits for a lock that another program holds


class Writer:
    """Owns the only connection that writes. All methods are thread-safe."""

    def __init__(self, path: Path, *, interval_s: float, capacity: int) -> None:
        self._path = path
        self._interval_s = interval_s
        self._capacity = capacity
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._pending: list[Change] = []
        self._recorded = 0  # changes since the start
        self._committed = 0
        self._synced = 0  # changes that are synced to disk
        self._idle = False  # the thread sleeps until the next change
        self._urgent = False  # the thread must not wait for more changes
        self._closing = False
        self._failure: BaseException | None = None
        self._durable_waiters: list[tuple[int, Future[None]]] = []  # (`_synced` to wait for, waiter)
        self._room_waiters: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="stretto-journal", daemon=True)
        self._thread.start()

    # -- callers --------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Changes recorded and not yet committed."""
        return self._recorded - self._committed

    def record(
        self, write: Callable[Concatenate[sqlite3.Connection, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Queues the call `write(connection, *args, **kwargs)`; see `queue`."""
        self.queue((write, args, kwargs))

    def queue(self, change: Change) -> None:
        """Queues a change. Never blocks on the disk. The arguments of the change must not be modified afterwards."""
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._error()
            backlog = self._recorded - self._committed
            if backlog >= self._capacity:
                if backlog >= 2 * self._capacity:
                    raise JournalError(
                        f"journal `{self._path}` is {backlog} changes behind: the disk is too slow, and the caller did "
                        "not wait for room"
                    )
                self._hurry()
            self._pending.append(change)
            self._recorded += 1
            if self._idle:
                self._wake.notify()

    async def durable(self, timeout_s: float) -> None:
        """Waits until everything recorded so far is on disk."""
        await self._wait(self._ask_durable(), timeout_s, "to be on disk")

    def flush(self, timeout_s: float) -> None:
        """Does the same as `durable` for callers without an event loop; blocks."""
        future = self._ask_durable()
        try:
            future.result(timeout_s)
        except FutureTimeoutError as error:
            future.cancel()
            raise self._too_late(timeout_s, "to be on disk") from error

    async def room(self, timeout_s: float) -> None:
        """Waits until fewer than `capacity` changes are queued. Normally returns at once."""
        while True:
            with self._lock:
                if self._failure is not None or self._closing:
                    raise self._error()
                if self.backlog < self._capacity:
                    return
                future: Future[None] = Future()
                self._room_waiters.append(future)
                self._hurry()
            await self._wait(future, timeout_s, "for room in its queue")  # others waited too and may have filled it

    def close(self) -> None:
        """Writes what is left and stops the thread. Raises if anything could not be written. Safe to call twice."""
        with self._lock:
            first = not self._closing
            self._closing = True
            self._hurry()
        self._thread.join()
        if first and self._failure is not None:
            raise self._error()

    def _ask_durable(self) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._error()
            if self._synced == self._recorded:
                future.set_result(None)
            else:
                self._durable_waiters.append((self._recorded, future))
                self._hurry()
        return future

    async def _wait(self, future: Future[None], timeout_s: float, reason: str) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError as error:
            raise self._too_late(timeout_s, reason) from error

    def _too_late(self, timeout_s: float, reason: str) -> JournalError:
        return JournalError(
            f"journal `{self._path}`: waited {timeout_s:g} s {reason}, {self.backlog} changes behind; "
            "the disk is too slow or another program holds a lock on the file"
        )

    def _error(self) -> JournalError:
        if self._failure is None:
            return JournalError(f"journal `{self._path}` is closed")
        failure = self._failure
        text = f"journal `{self._path}` cannot be written: {failure}"
        if isinstance(failure, sqlite3.OperationalError) or isinstance(failure.__cause__, sqlite3.OperationalError):
            text += "; earlier records are intact: make the disk writable, and continue with `--resume`"
        error = JournalError(text)
        error.__cause__ = failure
        return error

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.notify()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=LOCKED_TIMEOUT_S)
            while (work := self._collect()) is not None:
                self._write(connection, *work)
            connection.close()
        except BaseException as error:
            # Every later call raises it; an exception in the thread itself would be lost.
            self._fail(error)
            if connection is not None:
                connection.close()  # rolls back what was not committed

    def _collect(self) -> tuple[list[Change], bool] | None:
        """Waits for and returns the changes of the next transaction, and True if it must be synced; None at the end."""
        with self._lock:
            while not (self._pending or self._durable_waiters or self._closing):
                self._urgent = False
                self._idle = True
                self._wake.wait()
                self._idle = False
            deadline = time.monotonic() + self._interval_s
            while not self._urgent and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(left)
            self._urgent = False
            changes, self._pending = self._pending, []
            sync = bool(self._durable_waiters) or self._closing
            if not changes and self._closing and not self._durable_waiters:
                return None
            return changes, sync

    def _write(self, connection: sqlite3.Connection, changes: list[Change], sync: bool) -> None:
        connection.execute("PRAGMA synchronous = " + ("FULL" if sync else "NORMAL"))
        connection.execute("BEGIN IMMEDIATE")
        for write, args, kwargs in changes:
            try:
                write(connection, *args, **kwargs)
            except Exception as error:
                what = f"{write.__name__}({args[0] if args else ''})"
                raise JournalError(f"{error}, while recording `{what}`") from error
        if sync and not changes:
            # Earlier commits may not be synced: a transaction that changes a page syncs them all. The value must
            # change, or SQLite writes no page and syncs nothing.
            connection.execute(
                "INSERT INTO run VALUES ('syncs', '1') ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )
        connection.execute("COMMIT")
        with self._lock:
            self._committed += len(changes)
            if sync:
                self._synced = self._committed
            ready = [future for count, future in self._durable_waiters if count <= self._synced]
            self._durable_waiters = [waiter for waiter in self._durable_waiters if waiter[0] > self._synced]
            if self.backlog < self._capacity:
                ready += self._room_waiters
                self._room_waiters = []
            if self._durable_waiters or self._room_waiters:
                self._urgent = True
        for future in ready:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            waiting = [future for _, future in self._durable_waiters] + self._room_waiters
            self._durable_waiters, self._room_waiters, self._pending = [], [], []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._error())
