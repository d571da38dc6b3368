"""Reading a journal: for a run that is taken up again, and for people. Works while the run goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import JournalError
from stretto.store.schema import UNDER_WAY, RunFacts, connect_readonly, journal_path
from stretto.types import Completion, Prompt, Sample, Supports

_COMPLETION = (
    "c.version, c.tokens, c.logprobs, c.finish, c.checksum, c.token_versions, c.started_at, c.finished_at, "
    "c.prefilled, c.supports, c.turns"
)


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """Where a trajectory stands."""

    trajectory: int
    group: int
    member: int
    version: int
    seed: int
    state: str
    failures: int  # attempts to generate or to score it
    instance: int | None
    reward: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An admitted group with all of its trajectories, ended ones too."""

    group: int
    epoch: int | None  # None: rows come as often as their priority has it
    row_number: int  # of the data set
    version: int
    deadline: int
    staleness: int
    prompt: Prompt
    admitted_at: float
    trajectories: tuple[TrajectoryRecord, ...]


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """An update and what its batch was like; `finished_at` is None while it trains."""

    update: int
    taken_at: float
    finished_at: float | None
    metrics: Mapping[str, Any]
    num_samples: int
    num_again: int  # of them used before
    reward: float  # mean
    tokens: float  # mean of a completion
    age: float  # mean, in updates
    oldest: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A trained sample as people read it."""

    trajectory: int
    group: int
    member: int
    version: int
    age: int
    use: int
    prompt: str
    text: str
    reward: float | None
    num_tokens: int  # sampled
    finish: str
    turns: int
    turn_rewards: tuple[float, ...] | None  # of each, where they are told apart


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    version: int
    kind: str
    at: float
    reward: float | None
    num: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One process's work on the run; `outcome` is None while it runs, and for ever if it was killed."""

    started_at: float
    ended_at: float | None
    outcome: str | None


class JournalReader:
    """A read-only view of a run folder or of its journal. Each call sees the latest commit."""

    def __init__(self, path: str | Path) -> None:
        self.path = journal_path(path)
        self._db = connect_readonly(self.path)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Everything read inside sees one and the same commit."""
        self._rows("BEGIN")
        try:
            yield
        finally:
            self._rows("ROLLBACK")

    def _rows(self, sql: str, *args: Any) -> list[Any]:
        try:
            return self._db.execute(sql, args).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"journal `{self.path}` cannot be read: {error}") from error

    # -- the run ----------------------------------------------------------------------------------------------------

    def has_begun(self) -> bool:
        """Whether a session was ever recorded; a run killed in its first moments has none."""
        return bool(self._rows("SELECT 1 FROM run WHERE key = 'paradigm'"))

    def facts(self) -> RunFacts:
        """What the run is."""
        stored = {key: json.loads(value) for key, value in self._rows("SELECT key, value FROM run")}
        missing = [each.name for each in fields(RunFacts) if each.default is MISSING and each.name not in stored]
        if missing:
            raise JournalError(f"journal `{self.path}` does not say what run it is of: no `{missing[0]}`")
        return RunFacts(**{each.name: stored[each.name] for each in fields(RunFacts) if each.name in stored})

    def base(self) -> str | None:
        """The checksum of the base that adapters belong to; None: there are none, or it was not recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'base'")
        return json.loads(rows[0][0]) if rows else None

    def sessions(self) -> list[SessionRecord]:
        """Every time that a process took the run up."""
        rows = self._rows("SELECT started_at, ended_at, outcome FROM sessions ORDER BY session")
        return [SessionRecord(*row) for row in rows]

    def versions(self) -> dict[int, str]:
        """The checksum of every version."""
        return dict(self._rows("SELECT version, checksum FROM versions ORDER BY version"))

    def counts(self) -> dict[str, int]:
        """Trajectories by state."""
        return dict(self._rows("SELECT state, COUNT(*) FROM trajectories GROUP BY state ORDER BY state"))

    def num_groups(self) -> int:
        """Groups admitted so far, which is also the next group's id."""
        count: int = self._rows("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups")[0][0]
        return count

    def num_updates(self) -> int:
        """Updates that the trainer has finished."""
        count: int = self._rows("SELECT COUNT(*) FROM updates WHERE finished_at IS NOT NULL")[0][0]
        return count

    # -- trajectories -----------------------------------------------------------------------------------------------

    def ids(self, *states: str) -> list[int]:
        """The trajectories in one of `states`, in order."""
        marks = ", ".join("?" * len(states))
        rows = self._rows(f"SELECT trajectory FROM trajectories WHERE state IN ({marks}) ORDER BY 1", *states)
        return [row[0] for row in rows]

    def trajectory(self, trajectory: int) -> TrajectoryRecord:
        """Where one trajectory stands."""
        found = self._trajectories("WHERE trajectory = ?", trajectory)
        if not found:
            raise JournalError(f"journal `{self.path}` has no trajectory {trajectory}")
        return found[0]

    def outstanding(self) -> list[GroupRecord]:
        """The groups with trajectories under way, by id: what a resumed run goes on with."""
        marks = ", ".join("?" * len(UNDER_WAY))
        return self._groups(f"(SELECT group_id FROM trajectories WHERE state IN ({marks}))", *UNDER_WAY)

    def groups(self, ids: Collection[int]) -> list[GroupRecord]:
        """These groups, in order of their ids."""
        return [record for id in sorted(ids) for record in self._groups("(?)", id)]

    def _groups(self, chosen: str, *args: Any) -> list[GroupRecord]:
        rows = self._rows(
            "SELECT group_id, epoch, row_number, version, deadline, staleness, prompt_index, prompt_text, "
            f"prompt_tokens, row, admitted_at FROM groups WHERE group_id IN {chosen} ORDER BY group_id",
            *args,
        )
        groups = []
        for group, epoch, number, version, deadline, staleness, index, text, tokens, row, at in rows:
            prompt = Prompt(index, text, tuple(np.frombuffer(tokens, "<i4").tolist()), json.loads(row))
            members = tuple(self._trajectories("WHERE group_id = ? ORDER BY member", group))
            groups.append(GroupRecord(group, epoch, number, version, deadline, staleness, prompt, at, members))
        return groups

    def _trajectories(self, where: str, *args: Any) -> list[TrajectoryRecord]:
        failures = "(SELECT COUNT(*) FROM failures WHERE failures.trajectory = trajectories.trajectory)"
        columns = f"trajectory, group_id, member, version, seed, state, {failures}, instance, reward, error"
        return [TrajectoryRecord(*row) for row in self._rows(f"SELECT {columns} FROM trajectories {where}", *args)]

    def load_completion(self, trajectory: int) -> tuple[Completion, float | None, tuple[float, ...] | None]:
        """What a trajectory generated, its reward if it has one, and those of its turns where they are told apart."""
        rows = self._rows(
            f"SELECT t.reward, t.turn_rewards, {_COMPLETION} FROM completions c JOIN trajectories t USING (trajectory) "
            "WHERE trajectory = ?",
            trajectory,
        )
        if not rows:
            raise JournalError(f"journal `{self.path}` has no completion of trajectory {trajectory}")
        reward, by_turn, *made = rows[0]
        return _completion(trajectory, made), reward, _rewards(by_turn)

    # -- updates ----------------------------------------------------------------------------------------------------

    def members(self, update: int) -> list[int]:
        """The trajectories of an update's batch, in order; empty if it was not taken."""
        return [
            r[0] for r in self._rows("SELECT trajectory FROM members WHERE update_id = ? ORDER BY position", update)
        ]

    def batch(self, update: int) -> list[Sample]:
        """The batch of an update as the trainer got it."""
        rows = self._rows(
            "SELECT m.trajectory, t.group_id, t.version, g.prompt_tokens, t.reward, m.use, t.turn_rewards, "
            f"{_COMPLETION} "
            "FROM members m JOIN trajectories t USING (trajectory) JOIN groups g USING (group_id) JOIN completions c "
            "USING (trajectory) WHERE m.update_id = ? ORDER BY m.position",
            update,
        )
        return [
            Sample(
                trajectory, group, version, np.frombuffer(prompt, "<i4").tolist(), _completion(trajectory, made),
                reward, use, _rewards(by_turn),
            )
            for trajectory, group, version, prompt, reward, use, by_turn, *made in rows
        ]  # fmt: skip

    def updates(self) -> list[UpdateRecord]:
        """Every update whose batch was taken, in order."""
        rows = self._rows(
            "SELECT u.update_id, u.taken_at, u.finished_at, u.metrics, COUNT(m.trajectory), "
            "COALESCE(SUM(m.use <> 0), 0), AVG(t.reward), "
            "AVG(c.num_sampled), AVG(u.update_id - t.version), MAX(u.update_id - t.version) FROM updates u "
            "LEFT JOIN members m USING (update_id) LEFT JOIN trajectories t USING (trajectory) "
            "LEFT JOIN completions c USING (trajectory) GROUP BY u.update_id ORDER BY u.update_id"
        )
        return [
            UpdateRecord(
                update,
                taken,
                finished,
                json.loads(line),
                count,
                again,
                reward or 0.0,
                tokens or 0.0,
                age or 0.0,
                old or 0,
            )
            for update, taken, finished, line, count, again, reward, tokens, age, old in rows
        ]

    def samples(self, update: int) -> list[SampleRecord]:
        """The samples of an update, in the order of its batch, as people read them."""
        rows = self._rows(
            "SELECT m.trajectory, t.group_id, t.member, t.version, m.update_id - t.version, m.use, g.prompt_text, "
            "COALESCE(c.text, ''), t.reward, COALESCE(c.num_sampled, 0), COALESCE(c.finish, ''), "
            "COALESCE(LENGTH(c.turns) / 8, 1), t.turn_rewards FROM members m "
            "JOIN trajectories t USING (trajectory) JOIN groups g USING (group_id) "
            "LEFT JOIN completions c USING (trajectory) WHERE m.update_id = ? ORDER BY m.position",
            update,
        )
        return [SampleRecord(*(*row[:-1], _rewards(row[-1]))) for row in rows]

    def evaluations(self) -> list[EvaluationRecord]:
        """Every evaluation, in the order in which they ended."""
        rows = self._rows("SELECT version, kind, at, reward, num, seconds FROM evaluations ORDER BY id")
        return [EvaluationRecord(*row) for row in rows]

    def notes(self) -> list[tuple[float, str, str]]:
        """(at, kind, text) of every note, in order."""
        return [(at, kind, text) for at, kind, text in self._rows("SELECT at, kind, text FROM notes ORDER BY id")]

    def failures(self) -> list[tuple[int, str, str]]:
        """(trajectory, kind, reason) of every attempt that failed, in order."""
        rows = self._rows("SELECT trajectory, kind, reason FROM failures ORDER BY id")
        return [(trajectory, kind, reason) for trajectory, kind, reason in rows]


def _completion(trajectory: int, row: Sequence[Any]) -> Completion:
    version, tokens, logprobs, finish, checksum, token_versions, started_at, finished_at, prefilled = row[:9]
    supports, turns = row[9:]
    return Completion(
        id=trajectory,
        version=version,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32),
        finish=finish,
        checksum=checksum,
        token_versions=None if token_versions is None else np.frombuffer(token_versions, "<i4").astype(np.int32),
        started_at=started_at,
        finished_at=finished_at,
        prefilled=prefilled,
        supports=None if supports is None else _supports(np.frombuffer(supports, "<i4"), len(tokens) // 4),
        turns=None if turns is None else np.frombuffer(turns, "<i4").astype(np.int32).reshape(-1, 2),
    )


def _rewards(by_turn: bytes | None) -> tuple[float, ...] | None:
    return None if by_turn is None else tuple(np.frombuffer(by_turn, "<f8").tolist())


def _supports(values: NDArray[np.int32], num_tokens: int) -> Supports:
    return Supports(values[:num_tokens].astype(np.int32), values[num_tokens:].astype(np.int32))
