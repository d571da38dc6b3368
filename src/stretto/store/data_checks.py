"""The checks of `verify` that are no law: what was trained on is what is recorded, and everything recorded fits it.

- The digests of each update are those of its rows (`digests.py`).
- The metrics and sums of each update that follow from its samples are computed again.
- Rewards, prompts and seeds are such as a run can have; `verify.py` checks the tokens.
- The recipes of the phases, `config.toml` and the other files of the run folder agree (`phase_checks.py`).
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.store.blobs import CompletionBlobs, read_parts, sampled_values
from stretto.store.digests import SIZE, row_digest, untrained_digest, update_digest
from stretto.store.mixture_checks import mixture_breaks
from stretto.store.phase_checks import CONFIG_NAME, phase_breaks, read_phases, rest_of_folder
from stretto.store.routing_files import read_record
from stretto.store.schema import FAILURES_OF_MEMBERS, LARGEST_ID, PHASES, UNTRAINED_OF_MEMBERS
from stretto.types import RewardPart, part_means

MAX_REWARD = 1e9  # the largest reward that can be trained on, written down apart from `environments/reward_range.py`
ROUNDING = 1e-9  # of a metric, relative to the largest number that it is made of

MEMBERS = """SELECT m.trajectory, m.use, m.lineage, t.group_id, t.version, t.reward, t.turn_rewards,
    t.reward_parts, COALESCE(c.context, g.prompt_tokens), c.turn_numbers, c.version, c.checksum, c.finish, c.tokens,
    c.logprobs, c.token_versions, c.supports, c.turns, c.routing, c.num_sampled, c.num_tokens, g.task
    FROM members m LEFT JOIN trajectories t USING (trajectory) LEFT JOIN groups g ON g.group_id = t.group_id
    LEFT JOIN completions c ON c.trajectory = m.trajectory AND c.lineage = m.lineage
    WHERE m.update_id = ? ORDER BY m.position"""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One member of a batch, from its rows: a lineage of a trajectory."""

    trajectory: int
    use: int
    lineage: int
    digest: bytes
    group: int
    reward: float
    num_sampled: int
    num_observed: int  # tokens between its turns
    num_turns: int | None  # None: its turns are not told apart
    truncated: bool
    oldest: int  # version of a token
    parts: tuple[RewardPart, ...] = ()  # of its reward, if it has several
    task: str | None = None  # the label of its task

    @property
    def name(self) -> str:
        return (
            f"lineage {self.lineage} of trajectory {self.trajectory}"
            if self.lineage
            else f"trajectory {self.trajectory}"
        )


@dataclass(slots=True)
class DataResult:
    """The breaks that were found, and what was checked."""

    breaks: list[str] = field(default_factory=list)
    num_updates: int = 0  # with a digest
    num_samples: int = 0  # of those updates
    ages: Counter[int] = field(default_factory=Counter)  # of the samples of all batches; of its oldest token each
    has_config: bool = False  # `config.toml` was there to be compared
    num_unrouted: int = 0  # trained samples whose record of routing is deleted


def check_data(
    db: sqlite3.Connection,
    folder: Path,
    facts: Mapping[str, Any],
    done: Callable[[int], None] = lambda num_updates: None,
) -> DataResult:
    """Checks the rows of a run in `folder`. `facts` are those of its journal. `done` gets the updates so far."""
    result = DataResult(has_config=(folder / CONFIG_NAME).exists())
    phases = read_phases(db)
    result.breaks += mixture_breaks(db, phases)
    _check_updates(db, result, done)
    result.breaks += _sessions(db)
    result.breaks += _prompts(db, facts.get("vocabulary", 0))
    result.breaks += _seeds(db, facts.get("seed"))
    _check_routing(db, folder, result)
    result.breaks += phase_breaks(phases, facts)
    result.breaks += rest_of_folder(folder, facts, phases, result.num_updates)
    return result


def _check_routing(db: sqlite3.Connection, folder: Path, result: DataResult) -> None:
    """Checks that records of routing are those that the journal has the stamps of. They may be gone."""
    rows = db.execute(
        "SELECT trajectory, lineage, routing, EXISTS (SELECT 1 FROM members m WHERE m.trajectory = c.trajectory AND "
        "m.lineage = c.lineage) FROM completions c WHERE routing IS NOT NULL"
    )
    for trajectory, lineage, stamped, is_trained in rows:
        try:
            is_there = read_record(folder, trajectory, lineage, stamped) is not None
        except (OSError, TypeError, ValueError) as error:
            result.breaks.append(f"trajectory {trajectory}: {error}")
            continue
        result.num_unrouted += is_trained and not is_there


# -- updates -----------------------------------------------------------------------------------------------------------


def _check_updates(db: sqlite3.Connection, result: DataResult, done: Callable[[int], None]) -> None:
    """Checks the digests, the metrics and the sums of every update."""
    made: dict[int, str] = {}  # the weights of a version when its update ended, if they were made again later
    for version, checksum in db.execute("SELECT version, checksum FROM remade ORDER BY rowid"):
        made.setdefault(version, checksum)
    failures: dict[int, list[tuple[int, str, int]]] = {}
    for update, *failure in db.execute(FAILURES_OF_MEMBERS, (0, LARGEST_ID)):
        failures.setdefault(update, []).append((failure[0], failure[1], failure[2]))
    untrained: dict[int, list[tuple[int, int, str]]] = {}
    for row in db.execute(UNTRAINED_OF_MEMBERS, (0, LARGEST_ID)):
        untrained.setdefault(row[0], []).append(untrained_digest(row))
    phases: dict[int, list[Sequence[object]]] = {}
    for row in db.execute(PHASES, (0, LARGEST_ID)):
        phases.setdefault(row[1], []).append(row)
    sums: Counter[str] = Counter()
    previous: object = None
    for update, finished_at, checksum, metrics, totals, digests, digest, advantages in db.execute(
        "SELECT update_id, finished_at, checksum, metrics, totals, samples, digest, advantages FROM updates "
        "ORDER BY update_id"
    ):
        done(result.num_updates)
        samples = []
        for row in db.execute(MEMBERS, (update,)):
            try:
                samples.append(read_sample(update, row))
            except (TypeError, ValueError):  # columns are missing or have other types
                result.breaks.append(f"trajectory {row[0]} of update {update} has no complete rows")
        if finished_at is None:
            result.ages.update(update - sample.oldest for sample in samples)
            continue
        if digest is None or not isinstance(digests, bytes):
            result.breaks.append(f"update {update} has no digest of what it trained on")
        else:
            members = [(sample.trajectory, sample.use, sample.lineage) for sample in samples]
            result.breaks += _other_samples(update, samples, digests)
            expected = update_digest(
                previous, update, members, digests,
                failures=failures.get(update, ()), row=(made.get(update + 1, checksum), advantages, metrics, totals),
                untrained=untrained.get(update, ()), phases=phases.get(update, ()),
            )  # fmt: skip
            if expected != digest:
                also = ", the recipe of a phase" if update in phases else ""
                result.breaks.append(
                    f"the digest of update {update} does not follow from the update before it and its own records: "
                    f"its members, their failed attempts, lineages that are not trained, its metrics, its sums{also} "
                    "or a digest were changed"
                )
        result.ages.update(update - sample.oldest for sample in samples)
        result.num_updates += 1
        result.num_samples += len(samples)
        previous = digest
        result.breaks += [f"update {update} {each}" for each in _metrics(update, samples, json.loads(metrics))]
        add_sums(sums, update, samples)
        if totals is not None:
            result.breaks += [f"update {update} {each}" for each in _totals(sums, json.loads(totals))]


def read_sample(update: int, row: Sequence[Any]) -> _Sample:
    trajectory, use, lineage, group, version, reward, turn_rewards, parts, prompt, *others = row
    numbers, made, checksum, finish, *rest = others
    tokens, logprobs, token_versions, supports, turns, routing, num_sampled, num_tokens, task = rest
    arrays = CompletionBlobs(tokens, logprobs, token_versions, supports, turns, routing)
    digest = row_digest(
        trajectory, group, version, reward, turn_rewards, prompt, made, checksum, finish, arrays, lineage, numbers,
        parts, task,
    )  # fmt: skip
    oldest = int(version)
    if token_versions is not None:
        drawn = sampled_values(np.frombuffer(token_versions, "<i4"), turns)
        oldest = int(drawn.min())
    return _Sample(
        trajectory=trajectory,
        use=use,
        lineage=int(lineage),
        digest=digest,
        group=group,
        reward=float(reward),
        num_sampled=int(num_sampled),
        num_observed=int(num_tokens) - int(num_sampled),
        num_turns=None if turns is None else len(turns) // 8,
        truncated=finish == "length",
        oldest=oldest,
        parts=read_parts(parts) or (),
        task=task,
    )


def _other_samples(update: int, samples: Sequence[_Sample], digests: bytes) -> Iterator[str]:
    if len(digests) != SIZE * len(samples):
        yield f"update {update} trained on {len(digests) // SIZE} samples, and its batch has {len(samples)}"
        return
    for place, sample in enumerate(samples):
        if sample.digest != digests[SIZE * place : SIZE * (place + 1)]:
            yield f"{sample.name} is not what update {update} trained on: its rows were changed"


def _metrics(update: int, samples: Sequence[_Sample], line: Mapping[str, Any]) -> Iterator[str]:
    """Returns the metrics that are not those of the samples. A metric that the trainer does not report is no break."""
    values = [abs(part.value) for sample in samples for part in sample.parts if part.value is not None]
    scale = max([1.0, *(abs(sample.reward) for sample in samples), *values])
    for name, value in expected_metrics(update, samples, line).items():
        if name in line and not _equal(line[name], value, scale if "reward" in name else 1.0):
            yield f"has `{name}` {line[name]} in its metrics, and its samples give {value}"


def expected_metrics(update: int, samples: Sequence[_Sample], line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics that follow from the samples of an update. `line` is what was recorded."""
    if not samples:
        return {}
    uses = _uses(samples)
    rewards = np.array([own[0].reward for own in uses])
    lengths = [sample.num_sampled for sample in samples]
    again = [sample for sample in samples if sample.use != 0]
    rows_by_age = Counter(update - sample.oldest for sample in samples)
    ages = Counter(update - min(sample.oldest for sample in own) for own in uses)
    return {
        "update": update,
        "reward_mean": float(rewards.mean()),
        "reward_std": _deviation(rewards),
        "num_sequences": len(samples),
        "groups": len({sample.group for sample in samples}),
        "length_mean": sum(lengths) / len(samples),
        "length_max": max(lengths),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
        "tokens": sum(lengths) - sum(sample.num_sampled for sample in again),
        "replayed_sequences": len(again),
        "replayed_tokens": sum(sample.num_sampled for sample in again),
        "staleness_mean": sum(age * count for age, count in ages.items()) / len(uses),
        "staleness_max": max(ages),
        "staleness_histogram": {str(age): ages[age] for age in sorted(ages)},
        "turns_mean": sum(sample.num_turns or 1 for sample in samples) / len(uses),
        "lineages_mean": len(samples) / len(uses),
        "observed_tokens": sum(sample.num_observed for sample in samples),
        **_means(uses),
        **{name: 0 for name in line if name.startswith("advantage_count_age_")},
        **{f"advantage_count_age_{age}": count for age, count in rows_by_age.items()},
        **_task_metrics(samples),
    }


def _means(uses: Sequence[Sequence[_Sample]]) -> dict[str, float]:
    """Returns the mean of each of several rewards, over the trajectories that it applies to."""
    return {f"reward/{name}": mean for name, mean in part_means(own[0].parts for own in uses).items()}


def _task_metrics(samples: Sequence[_Sample]) -> dict[str, Any]:
    """Returns the metrics that follow from the samples of each task that has a label."""
    found: dict[str, Any] = {}
    for label in {sample.task for sample in samples if sample.task is not None}:
        own = [sample for sample in samples if sample.task == label]
        rewards = np.array([uses[0].reward for uses in _uses(own)])
        found |= {
            f"task/{label}/groups": len({sample.group for sample in own if sample.use == 0}),
            f"task/{label}/reward": float(rewards.mean()),
            f"task/{label}/reward_std": _deviation(rewards),
            f"task/{label}/length": sum(sample.num_sampled for sample in own) / len(own),
            f"task/{label}/truncated": sum(sample.truncated for sample in own) / len(own),
        }
    return found


def _uses(samples: Sequence[_Sample]) -> list[list[_Sample]]:
    """Returns the samples of each trajectory and use: one for each lineage."""
    found: dict[tuple[int, int], list[_Sample]] = {}
    for sample in samples:
        found.setdefault((sample.trajectory, sample.use), []).append(sample)
    return list(found.values())


def _deviation(rewards: NDArray[np.float64]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):  # a reward that is not finite
        return float(rewards.std())


def _equal(recorded: object, value: Any, scale: float) -> bool:
    if isinstance(value, dict):
        return recorded == value
    if not isinstance(recorded, int | float):
        return False
    return math.isclose(recorded, value, rel_tol=ROUNDING, abs_tol=ROUNDING * scale)


def add_sums(sums: Counter[str], update: int, samples: Sequence[_Sample]) -> None:
    """Adds the samples of an update to the sums of the run, by their names in `totals`."""
    sums["steps"] += 1
    for task, _ in {(sample.task, sample.group) for sample in samples if sample.task is not None and not sample.use}:
        sums[f"groups of {task}"] += 1
    for own in _uses(samples):
        num_sampled = sum(sample.num_sampled for sample in own)
        if own[0].use == 0:
            sums["trained"] += 1
            sums["tokens"] += num_sampled
            sums["truncated"] += any(sample.truncated for sample in own)
        else:
            sums["replayed"] += 1
            sums["replayed_tokens"] += num_sampled
        sums[f"age {update - min(sample.oldest for sample in own)}"] += 1


def _totals(sums: Counter[str], totals: Mapping[str, Any]) -> Iterator[str]:
    for name in ("steps", "trained", "tokens", "truncated", "replayed", "replayed_tokens"):
        if name in totals and totals[name] != sums[name]:
            yield f"has a sum of `{name}` of {totals[name]}, and the updates so far give {sums[name]}"
    for task, own in totals.get("tasks", {}).items():
        trained = sums[f"groups of {task}"]
        if own.get("groups", 0) != trained:
            yield f"has a sum of {own.get('groups', 0)} groups of task {task!r}, and the updates so far give {trained}"
    ages = {name.removeprefix("age "): count for name, count in sums.items() if name.startswith("age ")}
    if "ages" in totals and totals["ages"] != ages:
        yield f"has sums of `ages` of {totals['ages']}, and the updates so far give {ages}"


def _sessions(db: sqlite3.Connection) -> Iterator[str]:
    """Compares the updates with the sums at the end of each session, and the last transition with SQLite's counter."""
    (done,) = db.execute("SELECT COUNT(finished_at) FROM updates").fetchone()
    rows = db.execute("SELECT session, totals, session = MAX(session) OVER () FROM sessions ORDER BY session")
    for session, totals, is_last in rows:
        steps = None if totals is None else json.loads(totals).get("steps")
        if steps is not None and (steps > done or (is_last and steps != done)):
            yield f"session {session} ended after {steps} updates, and {done} are recorded"
    last, num, given = db.execute(
        "SELECT COALESCE(MAX(seq), 0), COUNT(*), "
        "COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'transitions'), 0) FROM transitions"
    ).fetchone()
    if not last == num == given:
        yield f"{given} transitions were recorded, and there are {num}, the last of which has the number {last}"


# -- prompts and seeds -------------------------------------------------------------------------------------------------


def _prompts(db: sqlite3.Connection, vocabulary: int) -> Iterator[str]:
    for group, prompt in db.execute("SELECT group_id, prompt_tokens FROM groups"):
        if not isinstance(prompt, bytes) or not prompt or len(prompt) % 4:
            size = len(prompt) if isinstance(prompt, bytes) else 0
            yield f"group {group} has a prompt of {size} bytes, which is no row of tokens"
        elif sentence := token_range(prompt, vocabulary):
            yield f"the prompt of group {group} {sentence}"


def token_range(tokens: bytes, vocabulary: int) -> str:
    """Returns what is wrong with the range of token ids; empty if nothing is. `vocabulary` 0 is not known."""
    values = np.frombuffer(tokens, "<i4")
    if len(values) and (values.min() < 0 or (vocabulary and values.max() >= vocabulary)):
        return f"has tokens from {values.min()} to {values.max()}, outside of the vocabulary"
    return ""


def _seeds(db: sqlite3.Connection, seed: object) -> Iterator[str]:
    for trajectory, recorded in db.execute("SELECT trajectory, seed FROM trajectories"):
        if recorded != trajectory_seed(seed, trajectory):
            yield f"trajectory {trajectory} has the seed {recorded}, which does not follow from that of the run, {seed}"


def trajectory_seed(seed: object, trajectory: int) -> int:
    """The seed of a trajectory, written down apart from `run/seeds.py`."""
    digest = blake2b(f"{seed}/trajectory/{trajectory}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
