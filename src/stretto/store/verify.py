"""Proves the three laws of a run from its journal alone, with its own SQL: nothing here asks the code that kept them.

The checks are in `checks.py`; a law holds when none of its checks finds a break. The
paradigms `partial` and `drop` give up one law each by design: what they break of it is counted apart.

A run that is not finished (stopped, killed, or still going on) may have trajectories under way; they are counted.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import JournalError
from stretto.store.checks import CHECKS
from stretto.store.schema import connect_readonly, journal_path

NUM_DETAILS = 5  # offenders named for each law
LOGPROB_SLACK = 1e-3  # a log-probability computed in low precision may lie this far above 0

NAMES = {"1": "law 1  one voice", "2": "law 2  nothing lost", "3": "law 3  nothing old", "once": "       exactly once"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one law. `details` has a sentence for each of the first offenders."""

    law: str  # "1", "2", "3" or "once"
    broken: int  # breaks that nothing excuses
    by_paradigm: int | None  # breaks that the paradigm makes by design; None: it does not give up this law
    counts: str  # what was looked at, in words
    details: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.broken == 0


@dataclass(slots=True)
class _Run:
    """The run's facts, as the checks' parameters."""

    paradigm: str
    how: str  # in words
    params: dict[str, Any]
    breaks: dict[str, list[str]] = field(default_factory=lambda: {law: [] for law in NAMES})
    mixed: int = 0  # trajectories with tokens of other versions than their own
    num_tokens: int = 0


def verify(run_folder: str | Path) -> list[Finding]:
    """What the journal of a run proves, one finding for each law and one for exactly-once.

    Raises `RunError` where there is no journal and `JournalError` where it cannot be read.
    """
    path = journal_path(run_folder)
    db = connect_readonly(path)
    try:
        db.execute("BEGIN")  # one moment of a run that may be going on
        (health,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if health != "ok":
            raise JournalError(f"journal `{path}` is damaged: {health}")
        run = _read_run(db, path)
        for law, query in CHECKS:
            run.breaks[law] += [str(sentence) for (sentence,) in db.execute(query, run.params)]
        _check_tokens(db, run)
        return _findings(db, run)
    except sqlite3.Error as error:
        raise JournalError(f"journal `{path}` cannot be read: {error}") from error
    finally:
        db.close()


def format_findings(findings: Sequence[Finding]) -> str:
    """One line a law, and under it the first offenders by id."""
    lines = []
    for finding in findings:
        verdict = "holds" if finding.holds else f"BROKEN {finding.broken}"
        if finding.by_paradigm is not None:
            verdict = ("" if finding.holds else f"{verdict}, ") + f"broken by paradigm: {finding.by_paradigm};"
        lines.append(f"{NAMES[finding.law]:<20} {verdict:<10} {finding.counts}")
        lines += [f"{'':<20}   - {detail}" for detail in finding.details]
        if finding.broken > len(finding.details):
            lines.append(f"{'':<20}   - and {finding.broken - len(finding.details)} more")
    return "\n".join(lines)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if every law holds or is broken by the paradigm's design alone, else 1."""
    return 0 if all(finding.holds for finding in findings) else 1


def _read_run(db: sqlite3.Connection, path: Path) -> _Run:
    facts = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM run")}
    names = (
        *("paradigm", "staleness", "batch", "group", "updates", "data_rows", "retries", "filter_limit", "order"),
        *("replay_groups", "replay_uses"),
    )
    missing = [name for name in names if name not in facts]
    if missing:
        raise JournalError(f"journal `{path}` does not say what run it is of: no `{missing[0]}`")
    last = db.execute("SELECT outcome FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
    outcome = last[0] if last else None
    params = {name: facts[name] for name in names}
    params |= {"finished": outcome == "finished", "drops": facts["paradigm"] == "drop"}
    params["continues"] = facts["paradigm"] == "partial"
    how = {"finished": "run finished", "stopped": "run stopped"}.get(outcome or "", "run interrupted or going on")
    return _Run(facts["paradigm"], how, params)


def _check_tokens(db: sqlite3.Connection, run: _Run) -> None:
    """Law 1 and the log-probabilities of law 2, inside the blobs."""
    published: dict[int, set[str]] = {}  # one each, but for those that were lost and made again
    both = "SELECT version, checksum FROM versions UNION SELECT version, checksum FROM remade"
    for version, checksum in db.execute(both):
        published.setdefault(version, set()).add(checksum)
    rows = db.execute(
        "SELECT c.trajectory, t.version, c.version, c.checksum, c.num_tokens, c.tokens, c.logprobs, c.token_versions, "
        "c.supports, c.num_sampled, c.turns, t.reward, t.turn_rewards, m.update_id FROM completions c "
        "JOIN trajectories t USING (trajectory) LEFT JOIN members m ON m.trajectory = c.trajectory AND m.use = 0"
    )
    for trajectory, version, stamp, checksum, num_tokens, tokens, logprobs, token_versions, supports, *rest in rows:
        num_sampled, turns, reward, turn_rewards, update = rest
        run.num_tokens += num_sampled
        sizes = [len(part) for part in (tokens, logprobs, token_versions) if part is not None]
        if any(size != 4 * num_tokens for size in sizes):
            run.breaks["1"].append(f"trajectory {trajectory} has {num_tokens} tokens and blobs of {sizes} bytes")
            continue
        values = np.frombuffer(logprobs, "<f4")
        if not (np.isfinite(values).all() and (values <= LOGPROB_SLACK).all()):
            run.breaks["2"].append(f"trajectory {trajectory} has log-probabilities that are none")
        if supports is not None and not _drawn_from(np.frombuffer(tokens, "<i4"), np.frombuffer(supports, "<i4")):
            run.breaks["2"].append(f"trajectory {trajectory} has a token that is not among those it was drawn from")
        spans = np.array([[0, num_tokens]]) if turns is None else np.frombuffer(turns, "<i4").reshape(-1, 2)
        for sentence in (*_spans(spans, num_sampled, values), *_by_turn(spans, reward, turn_rewards)):
            run.breaks["2"].append(f"trajectory {trajectory} {sentence}")
        drawn = [version] if token_versions is None else np.frombuffer(token_versions, "<i4").tolist()
        mixed = any(other != version for other in drawn)
        for sentence in _voice(run, version, stamp, checksum, drawn if mixed else [version], published):
            run.breaks["1"].append(f"trajectory {trajectory} {sentence}")
        if mixed and update is not None and drawn[-1] > update:
            text = f"trajectory {trajectory} has tokens of version {drawn[-1]}, and update {update} trained on it"
            run.breaks["1"].append(text)
        run.mixed += mixed


def _spans(spans: NDArray[np.int32], num_sampled: int, logprobs: NDArray[np.float32]) -> Iterator[str]:
    """What is wrong with the turns of a trajectory: they follow one another, end with its tokens, and are all that
    was sampled."""
    places = spans.ravel()
    if not len(places) or places[0] < 0 or places[-1] != len(logprobs) or (np.diff(places) < 0).any():
        yield f"has turns at {spans.tolist()}, which do not lie one after the other in its {len(logprobs)} tokens"
        return
    sampled = np.zeros(len(logprobs), dtype=bool)
    for start, end in spans.tolist():
        sampled[start:end] = True
    if sampled.sum() != num_sampled or (num_sampled and (spans[:, 0] == spans[:, 1]).any()):
        yield f"has {sampled.sum()} tokens in {len(spans)} turns, and {num_sampled} are recorded as sampled"
    if logprobs[~sampled].any():
        yield "has log-probabilities of tokens that lie between its turns, which were observed"


def _by_turn(spans: NDArray[np.int32], reward: float | None, turn_rewards: bytes | None) -> Iterator[str]:
    if turn_rewards is None:
        return
    rewards = np.frombuffer(turn_rewards, "<f8").tolist()
    if len(rewards) != len(spans):
        yield f"has {len(spans)} turns and rewards of {len(rewards)}"
    elif reward != math.fsum(rewards):
        yield f"has a reward of {reward}, and those of its turns add up to {math.fsum(rewards)}"


def _drawn_from(tokens: NDArray[np.int32], supports: NDArray[np.int32]) -> bool:
    """Whether each token is in its own support, once."""
    counts, members = supports[: len(tokens)], supports[len(tokens) :]
    if len(counts) != len(tokens) or (counts < 1).any() or int(counts.sum()) != len(members):
        return False
    owners = np.repeat(np.arange(len(tokens)), counts)
    return np.array_equal(owners[members == tokens[owners]], np.arange(len(tokens)))


def _voice(
    run: _Run, version: int, stamp: int, checksum: str, drawn: list[int], published: dict[int, set[str]]
) -> Iterator[str]:
    """What is wrong with the versions of one trajectory's tokens; mixing them is no fault under `partial`.

    The checksum is that of the weights which drew the last of them.
    """
    mixed = drawn != [version]
    if mixed and run.paradigm != "partial":
        others = [other for other in drawn if other != version]
        yield f"of version {version} has {len(others)} tokens of other versions, the first of {others[0]}"
    elif mixed and (drawn != sorted(drawn) or drawn[0] < version or drawn[-1] not in published):
        yield f"of version {version} has tokens of versions {sorted(set(drawn))}, which do not follow one another"
    own = {version, *drawn} if mixed else {version}
    if stamp not in own:
        yield f"of version {version} was generated under version {stamp}"
    elif checksum not in published.get(last := drawn[-1], ()):
        recorded = " or ".join(sorted(published.get(last, ()))) or "not published"
        yield f"was generated by weights {checksum}, version {last} is {recorded}"


def _findings(db: sqlite3.Connection, run: _Run) -> list[Finding]:
    def one(query: str) -> Any:
        return db.execute(query).fetchone()

    states = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    training = states.get("training", 0)
    in_training = f", {training:,} of them in the batch of an update that is not finished" if training else ""
    ends = [f"{states.pop(end, 0):,} {end}" for end in ("trained", "failed", "filtered")]
    dropped, under_way = states.pop("dropped", 0), sum(states.values())
    (versions,) = one("SELECT COUNT(*) FROM versions")
    (completions,) = one("SELECT COUNT(*) FROM completions")
    uses, age, oldest = one(
        "SELECT COUNT(*), COALESCE(AVG(update_id - version), 0), COALESCE(MAX(update_id - version), 0) "
        "FROM members JOIN trajectories USING (trajectory)"
    )
    once, again = one(
        "SELECT COALESCE(SUM(use = 0), 0), COALESCE(SUM(use <> 0), 0) FROM members JOIN updates USING (update_id) "
        "WHERE finished_at IS NOT NULL"
    )
    updates, groups = one(
        "SELECT COUNT(DISTINCT update_id), COUNT(DISTINCT group_id) FROM updates JOIN members USING (update_id) "
        "JOIN trajectories USING (trajectory) WHERE finished_at IS NOT NULL AND use = 0"
    )
    (sessions,) = one("SELECT COUNT(*) FROM sessions")
    (remade,) = one("SELECT COUNT(DISTINCT version) FROM remade")
    counts = {
        "1": f"{completions:,} completions, {run.num_tokens:,} tokens, {versions:,} versions",
        "2": f"{', '.join(ends)}, {dropped:,} dropped, {under_way:,} under way{in_training} ({run.how}); "
        f"{groups:,} groups in {updates:,} updates",
        "3": f"{uses:,} samples, age mean {age:.2f} max {oldest}, bound {run.params['staleness']}",
        "once": f"{once:,} trained once, {again:,} later uses",
    }
    if taken := uses - once - again:
        counts["once"] += f", {taken:,} in the batch of an update that is not finished"
    if sessions > 1:
        counts["2"] += f"; taken up again {sessions - 1:,} times"
    if remade:
        counts["1"] += f", {remade:,} of them made again with other bits"
    excused = {"1": run.mixed if run.paradigm == "partial" else None, "2": dropped if run.params["drops"] else None}
    return [
        Finding(law, len(breaks), excused.get(law), counts[law], tuple(breaks[:NUM_DETAILS]))
        for law, breaks in run.breaks.items()
    ]
