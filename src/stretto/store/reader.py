"""Reads a journal, for resuming a run and for reports. Works while the run is active."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from stretto.errors import JournalError
from stretto.store.blobs import read_parts
from stretto.store.decoding import (
    LINEAGE,
    naming,
    oldest_version,
    read_greedy,
    read_lineage,
    read_mapping,
    read_reward,
    read_rewards,
    read_sample,
    read_task_scores,
    typed,
)
from stretto.store.records import (
    EvaluationRecord,
    GroupRecord,
    PhaseRecord,
    SampleRecord,
    SessionRecord,
    TaskRecord,
    TrajectoryRecord,
    UpdateRecord,
)
from stretto.store.schema import (
    ADMISSION,
    LAWS_GIVEN_UP,
    RESTORE,
    RESTORE_OR_BEGIN,
    UNDER_WAY,
    RunFacts,
    connect_readonly,
    journal_path,
    reading,
)
from stretto.types import Lineage, Prompt, Sample

P = ParamSpec("P")
R = TypeVar("R")

# The age of a sample in its batch: that of its oldest token.
_AGE = "m.update_id - iif(c.token_versions IS NULL, t.version, oldest(c.token_versions, c.turns))"


def _decodes(method: Callable[Concatenate[JournalReader, P], R]) -> Callable[Concatenate[JournalReader, P], R]:
    """Returns a method of the reader that raises `JournalError` for values that cannot be decoded."""

    @wraps(method)
    def decode(reader: JournalReader, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with reading(reader.path):
            return method(reader, *args, **kwargs)

    return decode


class JournalReader:
    """A read-only view of a run folder or of its journal. Each call sees the latest commit."""

    def __init__(self, path: str | Path) -> None:
        self.path = journal_path(path)
        self._db = connect_readonly(self.path)
        self._db.create_function("oldest", 2, oldest_version, deterministic=True)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Makes all reads inside the block see the same commit."""
        self._rows("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:  # SQLite ends it after some errors
                self._rows("ROLLBACK")

    def _rows(self, sql: str, *args: Any) -> list[Any]:
        with reading(self.path):
            return self._db.execute(sql, args).fetchall()

    # -- the run ----------------------------------------------------------------------------------------------------

    def has_begun(self) -> bool:
        """Tells if a session is recorded; a run that was killed at its start has none."""
        return bool(self._rows("SELECT 1 FROM run WHERE key = 'paradigm'"))

    @_decodes
    def facts(self) -> RunFacts:
        """Returns the facts of the run: paradigm, batch, seed and so on."""
        stored = {key: json.loads(value) for key, value in self._rows("SELECT key, value FROM run")}
        missing = [each.name for each in fields(RunFacts) if each.default is MISSING and each.name not in stored]
        if missing:
            raise JournalError(f"journal `{self.path}` lacks facts of its run: no `{missing[0]}`; {RESTORE_OR_BEGIN}")
        if stored["paradigm"] not in LAWS_GIVEN_UP:
            raise JournalError(f"journal `{self.path}` has the unknown paradigm `{stored['paradigm']}`: {RESTORE}")
        stored["laws_broken"] = tuple(stored.get("laws_broken", ()))  # JSON has no tuples
        stored["tasks"] = tuple(tuple(each) for each in stored.get("tasks", ()))
        return typed(RunFacts(**{each.name: stored[each.name] for each in fields(RunFacts) if each.name in stored}))

    @_decodes
    def base(self) -> str | None:
        """Returns the checksum of the base model of a LoRA run; None for a full run, or if it was not recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'base'")
        return json.loads(rows[0][0]) if rows else None

    @_decodes
    def sources(self) -> dict[str, str]:
        """Returns the digests of the source files that score the task; empty if none are recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'sources'")
        return {name: str(value) for name, value in read_mapping(rows[0][0]).items()} if rows else {}

    @_decodes
    def data(self) -> dict[str, Any]:
        """Returns what the prompts are made from (`Journal.read_from`); empty if that is not recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'data'")
        return dict(read_mapping(rows[0][0])) if rows else {}

    @_decodes
    def phases(self) -> list[PhaseRecord]:
        """Returns the phases of the run, in order."""
        rows = self._rows("SELECT phase, first_update, first_group, began_at, recipe FROM phases ORDER BY phase")
        return [typed(PhaseRecord(*row)) for row in rows]

    @_decodes
    def sessions(self) -> list[SessionRecord]:
        """Returns the sessions of the run, in order."""
        rows = self._rows("SELECT started_at, ended_at, outcome, error FROM sessions ORDER BY session")
        return [typed(SessionRecord(*row)) for row in rows]

    @_decodes
    def versions(self) -> dict[int, str]:
        """Returns the checksum of every version."""
        return dict(self._rows("SELECT version, checksum FROM versions ORDER BY version"))

    @_decodes
    def counts(self) -> dict[str, int]:
        """Returns the number of trajectories in each state."""
        return dict(self._rows("SELECT state, COUNT(*) FROM trajectories GROUP BY state ORDER BY state"))

    @_decodes
    def num_groups(self) -> int:
        """Returns the number of groups admitted so far, which is also the id of the next group."""
        count: int = self._rows("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups")[0][0]
        return count

    @_decodes
    def num_updates(self) -> int:
        """Returns the number of finished updates."""
        count: int = self._rows("SELECT COUNT(*) FROM updates WHERE finished_at IS NOT NULL")[0][0]
        return count

    @_decodes
    def least_updates(self) -> int:
        """Returns the updates that the run has to make for the groups that it has started, those made included."""
        rows = self._rows(
            "SELECT (SELECT COUNT(*) FROM updates), COUNT(DISTINCT group_id) FROM trajectories "
            "WHERE state IN ('waiting', 'running', 'scoring', 'scored')"
        )
        (taken, outstanding), facts = rows[0], self.facts()
        due = max(0, int(outstanding) - facts.reserve_groups)
        return int(taken) - (-due // facts.batch)

    # -- trajectories -----------------------------------------------------------------------------------------------

    def ids(self, *states: str) -> list[int]:
        """Returns the ids of the trajectories in one of `states`, in order."""
        marks = ", ".join("?" * len(states))
        rows = self._rows(f"SELECT trajectory FROM trajectories WHERE state IN ({marks}) ORDER BY 1", *states)
        return [row[0] for row in rows]

    @_decodes
    def trajectory(self, trajectory: int) -> TrajectoryRecord:
        """Returns the current state of one trajectory."""
        found = self._trajectories("WHERE trajectory = ?", trajectory)
        if not found:
            raise JournalError(f"journal `{self.path}` has no trajectory {trajectory}")
        return found[0]

    @_decodes
    def outstanding(self) -> list[GroupRecord]:
        """Returns the groups with trajectories in progress, by id. A resumed run continues them."""
        marks = ", ".join("?" * len(UNDER_WAY))
        return self._groups(f"(SELECT group_id FROM trajectories WHERE state IN ({marks}))", *UNDER_WAY)

    @_decodes
    def groups(self, ids: Collection[int]) -> list[GroupRecord]:
        """Returns these groups, in order of their ids."""
        return [record for id in sorted(ids) for record in self._groups("(?)", id)]

    def _groups(self, chosen: str, *args: Any) -> list[GroupRecord]:
        rows = self._rows(
            "SELECT group_id, epoch, row_number, version, deadline, staleness, prompt_index, prompt_text, "
            f"prompt_tokens, row, admitted_at, task FROM groups WHERE group_id IN {chosen} ORDER BY group_id",
            *args,
        )
        groups = []
        for group, epoch, number, version, deadline, staleness, index, text, tokens, row, at, task in rows:
            prompt = Prompt(index, text, tuple(np.frombuffer(tokens, "<i4").tolist()), read_mapping(row), task)
            members = tuple(self._trajectories("WHERE group_id = ? ORDER BY member", group))
            made = GroupRecord(group, epoch, number, version, deadline, staleness, prompt, at, members, task)
            groups.append(typed(made))
        return groups

    def _trajectories(self, where: str, *args: Any) -> list[TrajectoryRecord]:
        failures = "(SELECT COUNT(*) FROM failures WHERE failures.trajectory = trajectories.trajectory)"
        columns = (
            f"trajectory, group_id, member, version, seed, state, {failures}, instance, reward, error, reward_parts"
        )
        rows = self._rows(f"SELECT {columns} FROM trajectories {where}", *args)
        return [typed(TrajectoryRecord(*(*row[:-1], read_parts(row[-1])))) for row in rows]

    @_decodes
    def load_lineages(self, trajectory: int) -> tuple[tuple[Lineage, ...], float | None, tuple[float, ...] | None]:
        """Returns a trajectory's lineages, its reward (or None), and the rewards of its turns (or None)."""
        rows = self._rows(
            f"SELECT t.reward, t.turn_rewards, t.num_lineages, {LINEAGE} FROM completions c "
            "JOIN trajectories t USING (trajectory) JOIN groups g USING (group_id) "
            "WHERE trajectory = ? ORDER BY c.lineage",
            trajectory,
        )
        if not rows:
            raise JournalError(f"journal `{self.path}` has no completion of trajectory {trajectory}")
        reward, by_turn, num_lineages = rows[0][:3]
        with naming(trajectory):
            if [row[3] for row in rows] != list(range(num_lineages)):
                raise ValueError(f"it has {num_lineages} lineages, and those recorded are {[row[3] for row in rows]}")
            lineages = tuple(read_lineage(self.path.parent, trajectory, row[3], row[4:]) for row in rows)
            if num_lineages > 1:
                numbers = sorted(number for each in lineages for number in each.turn_numbers or ())
                if numbers != list(range(len(numbers))):
                    raise ValueError(f"the turns of its lineages have the numbers {numbers}")
            return lineages, None if reward is None else read_reward(reward), read_rewards(by_turn)

    # -- updates ----------------------------------------------------------------------------------------------------

    def members(self, update: int) -> list[int]:
        """Returns the trajectories of an update's batch, in order; empty if it was not taken."""
        rows = self._rows("SELECT trajectory FROM members WHERE update_id = ? ORDER BY position", update)
        return list(dict.fromkeys(row[0] for row in rows))

    @_decodes
    def batch(self, update: int) -> list[Sample]:
        """Returns the batch of an update, as the trainer got it. Raises `JournalError` if any part of it is missing."""
        return self._samples(f"of update {update}", "m.update_id = ? ORDER BY m.position", update)

    @_decodes
    def update_metrics(self, update: int) -> Mapping[str, Any]:
        """Returns the metrics of an update; empty if it has not ended."""
        rows = self._rows("SELECT metrics FROM updates WHERE update_id = ? AND metrics IS NOT NULL", update)
        return read_mapping(rows[0][0]) if rows else {}

    def trained(self) -> list[int]:
        """Returns the trajectories that were trained on, in the order of their first training."""
        rows = self._rows(
            "SELECT trajectory FROM members JOIN updates USING (update_id) "
            "WHERE use = 0 AND finished_at IS NOT NULL ORDER BY update_id, position"
        )
        return list(dict.fromkeys(row[0] for row in rows))

    @_decodes
    def trained_samples(self, trajectory: int) -> list[Sample]:
        """Returns one trajectory that was trained on, as the trainer got it first: a sample for each lineage."""
        where = "m.trajectory = ? AND m.use = 0 ORDER BY m.position"
        return self._samples(f"with trajectory {trajectory}", where, trajectory)

    def advantages(self) -> dict[int, str | None]:
        """Returns the digest of the advantages of every finished update."""
        return dict(self._rows("SELECT update_id, advantages FROM updates WHERE finished_at IS NOT NULL"))

    def _samples(self, what: str, where: str, *args: Any) -> list[Sample]:
        rows = self._rows(
            "SELECT m.trajectory, t.group_id, t.version, t.reward, m.use, t.turn_rewards, t.reward_parts, m.lineage, "
            f"g.task, {LINEAGE} "
            "FROM members m LEFT JOIN trajectories t USING (trajectory) LEFT JOIN groups g USING (group_id) "
            f"LEFT JOIN completions c ON c.trajectory = m.trajectory AND c.lineage = m.lineage WHERE {where}",
            *args,
        )
        if not rows:
            raise JournalError(f"journal `{self.path}` has no batch {what}: {RESTORE}")
        return [read_sample(self.path.parent, *row) for row in rows]

    @_decodes
    def updates(self) -> list[UpdateRecord]:
        """Returns every update whose batch was taken, in order."""
        rows = self._rows(
            "SELECT u.update_id, u.taken_at, u.finished_at, u.metrics, COUNT(m.trajectory), "
            "COALESCE(SUM(m.use <> 0), 0), COALESCE((SELECT AVG(reward) FROM (SELECT DISTINCT trajectory, use "
            "FROM members r WHERE r.update_id = u.update_id) JOIN trajectories USING (trajectory)), 0.0), "
            f"COALESCE(AVG(c.num_sampled), 0.0), COALESCE(AVG({_AGE}), 0.0), COALESCE(MAX({_AGE}), 0) FROM updates u "
            "LEFT JOIN members m USING (update_id) LEFT JOIN trajectories t USING (trajectory) "
            "LEFT JOIN completions c ON c.trajectory = m.trajectory AND c.lineage = m.lineage "
            "GROUP BY u.update_id ORDER BY u.update_id"
        )
        return [
            typed(UpdateRecord(update, taken_at, finished_at, read_mapping(metrics), *statistics))
            for update, taken_at, finished_at, metrics, *statistics in rows
        ]

    @_decodes
    def samples(self, update: int, most: int | None = None) -> list[SampleRecord]:
        """Returns the samples of an update as text, in the order of its batch.

        The lineages of its trajectories that are not trained are among them. With `most`, only so many trajectories are
        read, spread evenly over the batch.
        """
        chosen = "" if most is None else f"AND trajectory IN ({', '.join(map(str, self._spread(update, most)))})"
        rows = self._rows(
            f"SELECT m.trajectory, t.group_id, t.member, t.version, {_AGE}, m.use, g.prompt_text, "
            "COALESCE(c.text, ''), t.reward, COALESCE(c.num_sampled, 0), COALESCE(c.finish, ''), "
            "COALESCE(LENGTH(c.turns) / 8, 1), COALESCE(c.lineage, 0), COALESCE(t.num_lineages, 1), "
            "COALESCE(c.train, 1), iif(c.context IS NULL, NULL, COALESCE(c.context_text, '')), t.turn_rewards, "
            "t.limit_reached, t.spent, g.task, t.reward_parts FROM "
            f"(SELECT update_id, trajectory, use, MIN(position) AS position FROM members WHERE update_id = ? {chosen} "
            "GROUP BY trajectory, use) m JOIN trajectories t USING (trajectory) JOIN groups g USING (group_id) "
            "LEFT JOIN completions c USING (trajectory) ORDER BY m.position, c.lineage",
            update,
        )
        return [
            typed(
                SampleRecord(
                    *(*row[:14], row[14] == 1, row[15], read_rewards(row[16]), *row[17:-1], read_parts(row[-1])),
                )
            )
            for row in rows
        ]

    def _spread(self, update: int, most: int) -> list[int]:
        """Returns up to `most` trajectories of an update, spread evenly over its batch."""
        sql = "SELECT trajectory FROM members WHERE update_id = ? GROUP BY trajectory ORDER BY MIN(position)"
        ids = [int(row[0]) for row in self._rows(sql, update)]
        return [ids[number * len(ids) // most] for number in range(most)] if len(ids) > most else ids

    @_decodes
    def tasks(self) -> list[TaskRecord]:
        """Returns the tasks that have labels, in the order of their first groups, with what became of their groups."""
        rows = self._rows(
            "WITH ends AS (SELECT g.group_id, task, "
            "MAX(state IN ('trained', 'training')) AS taken, MAX(state = 'filtered') AS filtered, "
            "SUM(state = 'failed') AS failed, AVG(iif(state = 'trained', reward, NULL)) AS reward "
            "FROM groups g JOIN trajectories USING (group_id) WHERE task NOTNULL GROUP BY g.group_id) "
            "SELECT task, COUNT(*), SUM(taken), SUM(filtered), SUM(failed), AVG(reward) FROM ends GROUP BY task "
            "ORDER BY MIN(group_id)"
        )
        return [typed(TaskRecord(*row)) for row in rows]

    @_decodes
    def evaluations(self) -> list[EvaluationRecord]:
        """Returns every evaluation, in the order in which they ended."""
        rows = self._rows("SELECT version, kind, at, reward, num, seconds, line FROM evaluations ORDER BY id")
        return [typed(EvaluationRecord(*(*row[:-1], read_greedy(row[-1]), read_task_scores(row[-1])))) for row in rows]

    @_decodes
    def notes(self) -> list[tuple[float, str, str]]:
        """Returns (at, kind, text) of every note, in order; without those of admission, which are many."""
        rows = self._rows(f"SELECT at, kind, text FROM notes WHERE kind != '{ADMISSION}' ORDER BY id")
        return [(at, kind, text) for at, kind, text in rows]

    @_decodes
    def failures(self) -> list[tuple[int, str, str]]:
        """Returns (trajectory, kind, reason) of every failed attempt, in order."""
        rows = self._rows("SELECT trajectory, kind, reason FROM failures ORDER BY id")
        return [(trajectory, kind, reason) for trajectory, kind, reason in rows]
