"""Reads a journal, for resuming a run and for reports. Works while the run is active."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from stretto.errors import JournalError
from stretto.store.blobs import read_parts, sampled_values
from stretto.store.routing_files import read_record
from stretto.store.schema import (
    ADMISSION,
    LAWS_GIVEN_UP,
    RESTORE,
    RESTORE_OR_BEGIN,
    UNDECODABLE,
    UNDER_WAY,
    RunFacts,
    connect_readonly,
    journal_path,
    reading,
)
from stretto.types import Completion, HeldOutScore, Lineage, Prompt, RewardPart, Sample, Supports

P = ParamSpec("P")
R = TypeVar("R")

_COMPLETION = (
    "c.version, c.tokens, c.logprobs, c.finish, c.checksum, c.token_versions, c.started_at, c.finished_at, "
    "c.prefilled, c.supports, c.turns, c.receipts, c.routing"
)
_LINEAGE = f"c.lineage, COALESCE(c.context, g.prompt_tokens), c.train, c.turn_numbers, {_COMPLETION}"

# The age of a sample in its batch: that of its oldest token.
_AGE = "m.update_id - iif(c.token_versions IS NULL, t.version, oldest(c.token_versions, c.turns))"


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """The current state of a trajectory."""

    trajectory: int
    group: int
    member: int
    version: int
    seed: int
    state: str
    failures: int  # failed attempts to generate or to score it
    instance: int | None
    reward: float | None
    error: str | None
    reward_parts: tuple[RewardPart, ...] | None = None  # if the task has several rewards


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An admitted group with all of its trajectories, including those that have ended."""

    group: int
    epoch: int | None  # None: rows are drawn by pass rate, not in epochs
    row_number: int  # of the data set
    version: int
    deadline: int
    staleness: int
    prompt: Prompt
    admitted_at: float
    trajectories: tuple[TrajectoryRecord, ...]
    task: str | None = None  # the label of its task


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """An update with statistics of its batch; `finished_at` is None while it trains."""

    update: int
    taken_at: float
    finished_at: float | None
    metrics: Mapping[str, Any]
    num_samples: int
    num_again: int  # of them trained before (reuse)
    reward: float  # mean
    tokens: float  # mean length of a completion
    age: float  # mean, in updates
    oldest: int  # the highest age


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A lineage of a trained trajectory, as text."""

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
    lineage: int
    num_lineages: int
    train: bool  # False: it was not trained on
    context: str | None  # None: the prompt
    turn_rewards: tuple[float, ...] | None  # one for each turn of the trajectory, if the environment returns them
    limit: str | None  # that its episode reached
    spent: float | None  # by its episode
    task: str | None  # the label of its task
    reward_parts: tuple[RewardPart, ...] | None = None  # if the task has several rewards

    @property
    def rewards(self) -> dict[str, float | None]:
        """The value of each reward by its name, without its weight; None: it does not apply. Empty: there is one."""
        return {part.name: part.value for part in self.reward_parts or ()}


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task of a run, and what became of its groups so far."""

    label: str
    drawn: int  # groups
    trained: int  # groups; those of an update that trains now are among them
    filtered: int  # groups
    failed: int  # trajectories
    reward: float | None  # mean of the trained trajectories' groups; None: there is none


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation; `reward` is None if it was skipped, or nothing could be scored."""

    version: int
    kind: str
    at: float
    reward: float | None
    num: int  # prompts that `reward` is the mean of
    seconds: float
    greedy: HeldOutScore | None  # None: not asked for, or skipped
    tasks: Mapping[str, float | None]  # the score of each task that has a label


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A part of a run with one recipe."""

    phase: int
    first_update: int  # that is trained under it
    first_group: int  # that is admitted under it
    began_at: float
    recipe: str  # TOML


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session (one process's life of the run); `outcome` is None while it runs and if it was killed.

    `error` is the first line of the error that it failed by.
    """

    started_at: float
    ended_at: float | None
    outcome: str | None
    error: str | None = None


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
        self._db.create_function("oldest", 2, _oldest, deterministic=True)

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
        return _typed(RunFacts(**{each.name: stored[each.name] for each in fields(RunFacts) if each.name in stored}))

    @_decodes
    def base(self) -> str | None:
        """Returns the checksum of the base model of a LoRA run; None for a full run, or if it was not recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'base'")
        return json.loads(rows[0][0]) if rows else None

    @_decodes
    def sources(self) -> dict[str, str]:
        """Returns the digests of the source files that score the task; empty if none are recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'sources'")
        return {name: str(value) for name, value in _mapping(rows[0][0]).items()} if rows else {}

    @_decodes
    def data(self) -> dict[str, Any]:
        """Returns what the prompts are made from (`Journal.read_from`); empty if that is not recorded."""
        rows = self._rows("SELECT value FROM run WHERE key = 'data'")
        return dict(_mapping(rows[0][0])) if rows else {}

    @_decodes
    def phases(self) -> list[PhaseRecord]:
        """Returns the phases of the run, in order."""
        rows = self._rows("SELECT phase, first_update, first_group, began_at, recipe FROM phases ORDER BY phase")
        return [_typed(PhaseRecord(*row)) for row in rows]

    @_decodes
    def sessions(self) -> list[SessionRecord]:
        """Returns the sessions of the run, in order."""
        rows = self._rows("SELECT started_at, ended_at, outcome, error FROM sessions ORDER BY session")
        return [_typed(SessionRecord(*row)) for row in rows]

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
            prompt = Prompt(index, text, tuple(np.frombuffer(tokens, "<i4").tolist()), _mapping(row), task)
            members = tuple(self._trajectories("WHERE group_id = ? ORDER BY member", group))
            made = GroupRecord(group, epoch, number, version, deadline, staleness, prompt, at, members, task)
            groups.append(_typed(made))
        return groups

    def _trajectories(self, where: str, *args: Any) -> list[TrajectoryRecord]:
        failures = "(SELECT COUNT(*) FROM failures WHERE failures.trajectory = trajectories.trajectory)"
        columns = (
            f"trajectory, group_id, member, version, seed, state, {failures}, instance, reward, error, reward_parts"
        )
        rows = self._rows(f"SELECT {columns} FROM trajectories {where}", *args)
        return [_typed(TrajectoryRecord(*(*row[:-1], read_parts(row[-1])))) for row in rows]

    @_decodes
    def load_lineages(self, trajectory: int) -> tuple[tuple[Lineage, ...], float | None, tuple[float, ...] | None]:
        """Returns a trajectory's lineages, its reward (or None), and the rewards of its turns (or None)."""
        rows = self._rows(
            f"SELECT t.reward, t.turn_rewards, t.num_lineages, {_LINEAGE} FROM completions c "
            "JOIN trajectories t USING (trajectory) JOIN groups g USING (group_id) "
            "WHERE trajectory = ? ORDER BY c.lineage",
            trajectory,
        )
        if not rows:
            raise JournalError(f"journal `{self.path}` has no completion of trajectory {trajectory}")
        reward, by_turn, num_lineages = rows[0][:3]
        with _of(trajectory):
            if [row[3] for row in rows] != list(range(num_lineages)):
                raise ValueError(f"it has {num_lineages} lineages, and those recorded are {[row[3] for row in rows]}")
            lineages = tuple(_lineage(self.path.parent, trajectory, row[3], row[4:]) for row in rows)
            if num_lineages > 1:
                numbers = sorted(number for each in lineages for number in each.turn_numbers or ())
                if numbers != list(range(len(numbers))):
                    raise ValueError(f"the turns of its lineages have the numbers {numbers}")
            return lineages, None if reward is None else _reward(reward), _rewards(by_turn)

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
        return _mapping(rows[0][0]) if rows else {}

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
            f"g.task, {_LINEAGE} "
            "FROM members m LEFT JOIN trajectories t USING (trajectory) LEFT JOIN groups g USING (group_id) "
            f"LEFT JOIN completions c ON c.trajectory = m.trajectory AND c.lineage = m.lineage WHERE {where}",
            *args,
        )
        if not rows:
            raise JournalError(f"journal `{self.path}` has no batch {what}: {RESTORE}")
        return [_sample(self.path.parent, *row) for row in rows]

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
            _typed(UpdateRecord(update, taken_at, finished_at, _mapping(metrics), *statistics))
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
            _typed(
                SampleRecord(
                    *(*row[:14], row[14] == 1, row[15], _rewards(row[16]), *row[17:-1], read_parts(row[-1])),
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
        return [_typed(TaskRecord(*row)) for row in rows]

    @_decodes
    def evaluations(self) -> list[EvaluationRecord]:
        """Returns every evaluation, in the order in which they ended."""
        rows = self._rows("SELECT version, kind, at, reward, num, seconds, line FROM evaluations ORDER BY id")
        return [_typed(EvaluationRecord(*(*row[:-1], _greedy(row[-1]), _task_scores(row[-1])))) for row in rows]

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


@contextmanager
def _of(trajectory: int) -> Iterator[None]:
    """Names the trajectory whose values cannot be decoded."""
    try:
        yield
    except UNDECODABLE as error:
        raise ValueError(f"trajectory {trajectory}: {error}") from error


def _sample(
    run: Path,
    trajectory: int,
    group: int,
    version: int,
    reward: Any,
    use: int,
    by_turn: bytes | None,
    parts: str | None,
    number: int,
    task: str | None,
    _: int | None,
    *made: Any,
) -> Sample:
    with _of(trajectory):
        lineage, rewards = _lineage(run, trajectory, number, made), _rewards(by_turn)
        completion, numbers = lineage.completion, lineage.turn_numbers
        if not lineage.train:
            raise ValueError(f"its lineage {number} is not to be trained")
        if rewards is not None and numbers is None and len(rewards) != len(completion.turn_lengths):
            raise ValueError(f"it has {len(completion.turn_lengths)} turns and {len(rewards)} rewards")
        if rewards is not None and numbers is not None and numbers[-1] >= len(rewards):
            raise ValueError(f"it has a turn {numbers[-1]} and {len(rewards)} rewards")
        return _typed(
            Sample(
                trajectory, group, version, list(lineage.context), completion, _reward(reward), use, rewards,
                lineage=number, turn_numbers=numbers, reward_parts=read_parts(parts), task=task,
            )
        )  # fmt: skip


def _lineage(run: Path, trajectory: int, number: int, row: Sequence[Any]) -> Lineage:
    """Returns a lineage from the columns `_LINEAGE` without its number. Raises like `_completion`.

    Its record of routing comes from its file, if that is still there.
    """
    context, train, turn_numbers, *made, routing = row
    completion = _completion(trajectory, made)
    if routing is not None:
        completion = replace(completion, routing=read_record(run, trajectory, number, routing))
    numbers = None if turn_numbers is None else tuple(np.frombuffer(turn_numbers, "<i4").tolist())
    if train not in (0, 1):
        raise ValueError(f"`train` is {reprlib.repr(train)}")
    if numbers is not None and (len(numbers) != len(completion.turn_lengths) or list(numbers) != sorted(set(numbers))):
        raise ValueError(f"it has {len(completion.turn_lengths)} turns in a lineage, with the numbers {list(numbers)}")
    return Lineage(tuple(np.frombuffer(context, "<i4").tolist()), completion, bool(train), numbers)


def _reward(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"its reward is {reprlib.repr(value)}")
    return value


def _completion(trajectory: int, row: Sequence[Any]) -> Completion:
    """Returns a completion from the columns `_COMPLETION` without its routing.

    Raises `ValueError` or `TypeError` if they do not agree.
    """
    version, tokens, logprobs, finish, checksum, token_versions, started_at, finished_at, prefilled = row[:9]
    supports, turns, receipts = row[9:]
    made = Completion(
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
        receipts=() if receipts is None else tuple(json.loads(receipts)),
    )
    num_tokens = len(made.tokens)
    for name in ("logprobs", "token_versions"):
        array = getattr(made, name)
        if array is not None and len(array) != num_tokens:
            raise ValueError(f"it has {num_tokens} tokens and {len(array)} `{name}`")
    if made.turns is not None:
        ends = [0, *made.turns.reshape(-1).tolist(), num_tokens]
        if len(made.turns) == 0 or ends != sorted(ends):
            raise ValueError(f"its turns are not in {num_tokens} tokens")
    return _typed(made)


def _oldest(token_versions: bytes, turns: bytes | None) -> int:
    """The oldest version of a sampled token."""
    return int(sampled_values(np.frombuffer(token_versions, "<i4"), turns).min())


def _rewards(by_turn: bytes | None) -> tuple[float, ...] | None:
    return None if by_turn is None else tuple(np.frombuffer(by_turn, "<f8").tolist())


def _supports(values: NDArray[np.int32], num_tokens: int) -> Supports:
    made = Supports(values[:num_tokens].astype(np.int32), values[num_tokens:].astype(np.int32))
    if len(made.counts) != num_tokens or (made.counts < 1).any() or made.counts.sum() != len(made.tokens):
        raise ValueError(f"its supports are not those of {num_tokens} tokens")
    return made


def _greedy(line: str | None) -> HeldOutScore | None:
    """Returns the greedy score that the line of an evaluation has; None if it has none."""
    found = None if line is None else _mapping(line).get("greedy")
    return None if found is None else _typed(HeldOutScore(*(found[each.name] for each in fields(HeldOutScore))))


def _task_scores(line: str | None) -> dict[str, float | None]:
    """Returns the score of each task that the line of an evaluation has."""
    found = {} if line is None else _mapping(line)
    return {
        name.split("/")[1]: value
        for name, value in found.items()
        if name.startswith("task/") and name.endswith("/score") and isinstance(value, float | int | None)
    }


def _mapping(text: str) -> dict[str, Any]:
    """Returns an object of JSON. Raises `ValueError` for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(text)} is not an object")
    return value


def _typed(record: R) -> R:
    """Returns a record. Raises `TypeError` if a value has another type than its field: SQLite may store any value."""
    kind: Any = type(record)
    for name, kinds in _kinds(kind).items():
        if not isinstance(value := getattr(record, name), kinds):
            raise TypeError(f"`{name}` is {reprlib.repr(value)}")
    return record


@cache
def _kinds(record: type[Any]) -> dict[str, tuple[type, ...]]:
    """Returns the types of the fields that are numbers and texts, and may be None."""
    plain: dict[Any, tuple[type, ...]] = {
        int: (int,), float: (float, int), str: (str,), bool: (bool,), type(None): (type(None),)
    }  # fmt: skip
    hints = {
        name: get_args(hint) if get_origin(hint) is UnionType else (hint,)
        for name, hint in get_type_hints(record).items()
    }
    return {
        name: tuple(kind for each in parts for kind in plain[each])
        for name, parts in hints.items()
        if all(each in plain for each in parts)
    }
