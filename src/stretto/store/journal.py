"""The journal: a durable record of every state change of every trajectory. `schema.py` documents its tables.

Recording is an append to a list; `writer.py` encodes and writes behind it. Two things must be durable before they
count, and the loop awaits `durable()` for both: the members of a batch before it trains, and the checksum of a version
before its first token. `await room()` is where the loop waits for a slow disk, with a deadline.

Exactly-once is a property of the file: (trajectory, use) is unique among the members of batches, an end is final, and
a completion is written once. What a killed run was follows from its journal (`recovery.py`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto.errors import JournalError, RunError
from stretto.store import changes
from stretto.store.lock import Lock
from stretto.store.reader import JournalReader as JournalReader
from stretto.store.schema import (
    JOURNAL_NAME,
    SCHEMA,
    SCHEMA_VERSION,
    Attempt,
    Departure,
    EvaluationKind,
    RunFacts,
    State,
    check_schema,
)
from stretto.store.writer import Writer
from stretto.types import Completion, Prompt

__all__ = ["JOURNAL_NAME", "Journal", "JournalReader", "RunFacts"]

WAIT_S = 60.0  # a disk that is slower than this ends the run


class Journal:
    """Records what happens to a run. Methods are thread-safe, never block on the disk, and take times as given.

    Every method raises `JournalError`, naming the file and the cause, once anything could not be written.
    """

    def __init__(self, path: Path, lock: Lock, stored: RunFacts | None, interval_s: float, capacity: int) -> None:
        self.path = path
        self._lock = lock
        self._stored = stored
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
        """Create the journal at `path`, or with `resume` take up the one that is there; one process at a time.

        `lock` is the run's where it was taken before; it is closed with the journal.
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
            raise JournalError(f"journal `{path}` cannot be opened: {error}") from error
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def backlog(self) -> int:
        """Changes recorded and not yet committed."""
        return self._writer.backlog

    async def durable(self, timeout_s: float = WAIT_S) -> None:
        """Return once everything recorded so far is on the disk; commits at once."""
        await self._writer.durable(timeout_s)

    def flush(self, timeout_s: float = WAIT_S) -> None:
        """`durable` for callers without an event loop; blocks."""
        self._writer.flush(timeout_s)

    async def room(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the queue has room; returns at once in the ordinary case."""
        await self._writer.room(timeout_s)

    def close(self) -> None:
        """Write what is left and stop; blocks until it is written. Safe to call twice."""
        try:
            self._writer.close()
        finally:
            self._lock.close()

    # -- the run ----------------------------------------------------------------------------------------------------

    def begin(self, facts: RunFacts, at: float) -> None:
        """Start a session. A resumed run keeps its paradigm, batch, group, seed, data and their order; no more."""
        for name in ("paradigm", "batch", "group", "seed", "data_rows", "order"):
            if self._stored is not None and getattr(self._stored, name) != getattr(facts, name):
                raise RunError(
                    f"`{name} = {getattr(facts, name)!r}` cannot resume `{self.path}`, which was recorded with "
                    f"`{getattr(self._stored, name)!r}`: use that, or start a new run"
                )
        self._writer.record(changes.begin, facts, at)

    def based_on(self, checksum: str) -> None:
        """What the run trains are adapters, which belong to a base of this checksum."""
        self._writer.record(changes.based_on, checksum)

    def finished(self, stopped: bool, at: float, totals: Mapping[str, Any] | None = None) -> None:
        """End the session: all updates are done, or (`stopped`) the run was asked to stop. `totals` are its sums."""
        self._writer.record(changes.finished, stopped, None if totals is None else dict(totals), at)

    def settle(self, retries: int, drops: bool, at: float) -> None:
        """Take a killed run up: end what was to end and was recorded in part only.

        A trajectory whose last try is recorded as failed fails; a group that is filtered in part is filtered; with
        `drops`, what is past its deadline is dropped. Nothing happens where nothing was cut off.
        """
        self._writer.record(changes.settle, retries, drops, at)

    def version_published(self, version: int, checksum: str, at: float) -> None:
        """Version `version` exists, with these weights."""
        self._writer.record(changes.version_published, version, checksum, at)

    def version_made_again(self, version: int, checksum: str, at: float) -> None:
        """The weights of a version were lost, and made again with other bits. What it had been is kept beside."""
        self._writer.record(changes.version_made_again, version, checksum, at)

    def version_loaded(self, version: int, checksum: str, at: float) -> None:
        """An engine confirmed the checksum of a version; the first time is kept."""
        self._writer.record(changes.version_loaded, version, checksum, at)

    def group_admitted(
        self,
        group: int,
        *,
        version: int,
        deadline: int,
        staleness: int,
        prompt: Prompt,
        epoch: int | None,
        row_number: int,
        trajectories: Sequence[int],
        seeds: Sequence[int],
        at: float,
        draw: str = "shuffled",
        instance: int | None = None,
    ) -> None:
        """A group starts: its trajectories, in the order of members and with a seed each, are `running`.

        `row_number` is the row of the data set, from 0, that the prompt was drawn from, and `draw` why; `epoch` is None
        where rows come as often as their priority has it.
        """
        self._writer.record(
            changes.group_admitted,
            group,
            version,
            deadline,
            staleness,
            prompt,
            epoch,
            row_number,
            draw,
            trajectories,
            seeds,
            at,
            instance,
        )

    # -- trajectories -----------------------------------------------------------------------------------------------

    def moved(
        self,
        trajectory: int,
        to_state: State,
        at: float,
        reason: str = "",
        instance: int | None = None,
    ) -> None:
        """A trajectory changed its state or its instance."""
        self._writer.record(changes.moved, trajectory, to_state, at, reason, instance)

    def attempt_failed(self, trajectory: int, kind: Attempt, reason: str, at: float) -> None:
        """An attempt to generate or to score a trajectory failed. What follows is another, or `failed`."""
        self._writer.record(changes.attempt_failed, trajectory, kind, reason, at)

    def generated(self, trajectory: int, completion: Completion, text: str, at: float) -> None:
        """A trajectory has its last token and is `scoring`. The completion's arrays must not change afterwards."""
        self._writer.record(changes.generated, trajectory, completion, text, at)

    def scored(self, trajectory: int, reward: float, at: float, turns: tuple[float, ...] | None = None) -> None:
        """A trajectory has its reward, a finite number; `turns` are those of its turns, where they are told apart."""
        if not math.isfinite(reward):
            raise JournalError(f"trajectory {trajectory} cannot be scored with {reward}: a reward is a finite number")
        self._writer.record(changes.scored, trajectory, reward, at, turns)

    def failed(self, trajectory: int, reason: str, at: float, num_tokens: int = 0) -> None:
        """A trajectory failed for good; `num_tokens` were sampled and are in no completion."""
        self._writer.record(changes.ended, trajectory, "failed", reason, at, num_tokens or None)

    def filtered(self, trajectory: int, reason: str, at: float) -> None:
        """A scored trajectory carries no signal and is replaced, because the recipe asks for it."""
        self._writer.record(changes.ended, trajectory, "filtered", reason, at)

    def dropped(self, trajectory: int, reason: str, at: float, num_tokens: int | None = None) -> None:
        """A trajectory is thrown away (the `drop` paradigm), `num_tokens` long so far."""
        self._writer.record(changes.ended, trajectory, "dropped", reason, at, num_tokens)

    def group_spared(self, group: int, update: int, text: str, at: float) -> None:
        """A scored group without signal is kept before the batch of `update`, the limit of filtered ones reached."""
        self._writer.record(changes.group_spared, group, update, text, at)

    # -- updates ----------------------------------------------------------------------------------------------------

    def batch_taken(
        self, update: int, trajectories: Sequence[int], at: float, uses: Sequence[int] | None = None
    ) -> None:
        """These trajectories, in this order, are the batch of `update`. Await `durable()` before it trains.

        An update that a killed run had begun is begun again with the same batch, which changes nothing here. `uses` are
        0 for those that are trained for the first time, and count up for each time that one is used again.
        """
        self._writer.record(changes.batch_taken, update, trajectories, uses or (0,) * len(trajectories), at)

    def update_done(
        self,
        update: int,
        metrics: Mapping[str, Any],
        at: float,
        checksum: str | None = None,
        totals: Mapping[str, Any] | None = None,
    ) -> None:
        """The trainer finished `update`: every member of its batch ends as `trained`.

        `checksum` is that of the weights that it made, version `update + 1`; `totals` are the sums of the run.
        """
        made = None if totals is None else dict(totals)
        self._writer.record(changes.update_done, update, dict(metrics), checksum, made, at)

    def evaluation(
        self,
        version: int,
        kind: EvaluationKind,
        at: float,
        reward: float | None = None,
        num: int = 0,
        seconds: float = 0.0,
        line: Mapping[str, Any] | None = None,
    ) -> None:
        """An evaluation of `version` over `num` prompts ended with this mean reward, or was skipped.

        `line` is what `metrics.jsonl` says of it.
        """
        made = None if line is None else dict(line)
        self._writer.record(changes.evaluation, version, kind, at, reward, num, seconds, made)

    # -- instances --------------------------------------------------------------------------------------------------

    def instance_joined(self, instance: int, slots: int, at: float) -> None:
        """An instance takes part in this session."""
        self._writer.record(changes.instance_joined, instance, slots, at)

    def instance_left(self, instance: int, outcome: Departure, reason: str, at: float) -> None:
        """An instance takes part no more."""
        self._writer.record(changes.instance_left, instance, outcome, reason, at)

    def carried(
        self,
        trajectory: int,
        *,
        version: int,
        source: int | None,
        target: int,
        context: int,
        num_bytes: int,
        prefilled: int,
        reason: str,
        at: float,
    ) -> None:
        """A trajectory goes on elsewhere: with so many bytes of its KV, or so many tokens prefilled again."""
        self._writer.record(
            changes.carried, trajectory, version, source, target, context, num_bytes, prefilled, reason, at
        )

    def note(self, kind: str, text: str, at: float) -> None:
        """Something a person will want to read: a wait, a move."""
        self._writer.record(changes.note, kind, text, at)


# -- opening -----------------------------------------------------------------------------------------------------------


def _prepare(path: Path) -> RunFacts | None:
    """Create the tables, or check those that are there; returns the facts that a resumed run was recorded with."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():  # a run killed as it began left it empty
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT")
            return None
        check_schema(connection, path)
        with JournalReader(path) as reader:
            return reader.facts() if reader.has_begun() else None
    finally:
        connection.close()
