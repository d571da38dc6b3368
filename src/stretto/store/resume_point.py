"""The point that a run had reached, from its journal: its updates, versions, metrics and sums.

`run/recovery.py` reads the rest.

The journal is a prefix of what happened, so it may know less than the process did, by the changes of one commit. That
loses nothing, because of the order in which things become durable:

| first                               | then                             | if the run dies in between          |
|-------------------------------------|----------------------------------|-------------------------------------|
| the run itself                      | any file that `traces.py` names  | the run begins                      |
| a batch's members                   | its update begins                | the same members are trained (*)    |
| a version's file, and its checksum  | an engine loads it, groups start | the update is trained again         |
| a group's admission, or not         | its tokens                       | same prompt, same seeds             |
| a completion, or not                | its reward                       | generated again: same version, seed |
| an update's end with the checksum   | its version is published         | published then                      |
| all updates before a checkpoint     | the checkpoint has its name      | an older one, more is trained again |
| the end of all that needs a version | its file is removed              | the file is there, not needed       |
| a line of `metrics.jsonl`, or not   | its update's end is recorded     | the file is written again           |

So the files beside a journal prove how far it had come, and `traces.py` finds a journal that has less.

(*) A batch that was taken and not trained may be undone, because nothing depends on it yet. This happens if one of its
rewards cannot be trained on, so that the update would fail every time (`Journal.score_again`).
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Any

from stretto.store.schema import opened_readonly


@dataclass(frozen=True, slots=True)
class Progress:
    """The point that a run had reached."""

    updates: int  # finished: the version that the trainer has to reach
    checksums: dict[int, str]  # of every version that was made
    lines: list[dict[str, Any]]  # of `metrics.jsonl`; updates and evaluations each in order, whatever the clocks said
    totals: dict[str, Any]  # the sums of the run; those that the journal does not count are of the last update or stop
    evaluated: frozenset[str]  # the moments, of "before" and "after" what the run has done, that were evaluated


def recorded_checksums(path: Path) -> dict[int, str]:
    """Returns the checksum of every version that was made, published or not; none if the run has not begun."""
    with opened_readonly(path) as db:
        return _checksums(db)


def progress_of(path: Path) -> Progress | None:
    """Returns how far the run of a journal had come; None if it had no version yet."""
    with opened_readonly(path) as db:
        checksums = _checksums(db)
        if not checksums:
            return None
        (updates,) = db.execute("SELECT COUNT(*) FROM updates WHERE finished_at IS NOT NULL").fetchone()
        lines = [
            json.loads(line) for (line,) in db.execute("SELECT metrics FROM updates WHERE finished_at IS NOT NULL")
        ]
        evaluations = [
            json.loads(line)
            for (line,) in db.execute("SELECT line FROM evaluations WHERE line IS NOT NULL ORDER BY id")
        ]
        # A run that was given more updates is evaluated after these, too.
        moments = frozenset(
            kind
            for (kind,) in db.execute(
                "SELECT DISTINCT kind FROM evaluations WHERE kind <> 'after' OR version = ?", (updates,)
            )
        )
        totals = _totals(db) | {"evaluations": [_without_kind(each) for each in evaluations]}
        lines = list(merge(lines, evaluations, key=lambda line: line["at"]))
        return Progress(updates, checksums, lines, totals, moments)


def _checksums(db: sqlite3.Connection) -> dict[int, str]:
    published = db.execute("SELECT version, checksum FROM versions")
    made = db.execute("SELECT update_id + 1, checksum FROM updates WHERE checksum IS NOT NULL")
    checksums = dict(published) | dict(made)
    if checksums.keys() != set(range(len(checksums))) or not all(isinstance(each, str) for each in checksums.values()):
        raise ValueError(f"it has the checksums of {len(checksums)} versions, and not of each up to the last")
    return checksums


def _without_kind(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "kind"}


def _last_totals(db: sqlite3.Connection) -> dict[str, Any]:
    """The sums of the last update, or of a stop after it. By their order: another machine's clock may be behind."""
    stop = db.execute("SELECT totals FROM sessions WHERE totals IS NOT NULL ORDER BY session DESC LIMIT 1").fetchone()
    done = db.execute("SELECT totals FROM updates WHERE totals IS NOT NULL ORDER BY update_id DESC LIMIT 1").fetchone()
    found: list[dict[str, Any]] = [json.loads(totals) for (totals,) in filter(None, (stop, done))]
    return max(found, key=lambda totals: totals["steps"], default={})


def _totals(db: sqlite3.Connection) -> dict[str, Any]:
    """The sums of the run. Seconds are those of the last update or stop; trajectories that ended since are counted."""
    totals = _last_totals(db)
    # Of a trained trajectory those tokens are counted that were trained on.
    lengths = (
        "FROM trajectories LEFT JOIN (SELECT trajectory, SUM(num_sampled) AS num_sampled FROM completions "
        "JOIN trajectories USING (trajectory) WHERE train OR state <> 'trained' GROUP BY trajectory) "
        "USING (trajectory) WHERE state"
    )
    ended: dict[str, tuple[int, int]] = {
        state: (count, tokens)
        for state, count, tokens in db.execute(
            f"SELECT state, COUNT(*), COALESCE(SUM(COALESCE(num_sampled, lost_tokens)), 0) {lengths} "
            "IN ('failed', 'dropped', 'filtered') GROUP BY state"
        )
    }
    sampled, sampled_tokens = db.execute(
        f"SELECT COUNT(*), COALESCE(SUM(COALESCE(num_sampled, lost_tokens)), 0) {lengths} "
        "IN ('trained', 'failed', 'dropped', 'filtered') AND COALESCE(num_sampled, lost_tokens, 0) > 0"
    ).fetchone()
    begun, complete, complete_tokens = db.execute(
        "SELECT COALESCE(SUM(COALESCE(num_sampled, lost_tokens, 0) > 0), 0), COUNT(num_sampled), "
        f"COALESCE(SUM(num_sampled), 0) {lengths} = 'dropped'"
    ).fetchone()
    groups, reward = db.execute(
        "SELECT COUNT(*), COALESCE(SUM(reward), 0) FROM (SELECT MAX(reward) AS reward FROM trajectories "
        "WHERE state = 'filtered' GROUP BY group_id)"
    ).fetchone()
    moves = db.execute(
        "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0), COALESCE(SUM(prefilled), 0) FROM moves"
    ).fetchone()
    (lost,) = db.execute("SELECT COUNT(*) FROM instances WHERE outcome = 'lost'").fetchone()
    return totals | {
        **dict(zip(("moves", "moved_bytes", "prefilled_again"), moves, strict=True)),
        "instances_lost": lost,
        "failed": ended.get("failed", (0, 0))[0],
        "dropped": ended.get("dropped", (0, 0))[0],
        "dropped_tokens": ended.get("dropped", (0, 0))[1],
        "dropped_begun": begun,
        "dropped_complete": complete,
        "dropped_complete_tokens": complete_tokens,
        "filtered": ended.get("filtered", (0, 0))[0],
        "filtered_tokens": ended.get("filtered", (0, 0))[1],
        "filtered_groups": groups,
        "filtered_reward": reward,
        "sampled": sampled,
        "sampled_tokens": sampled_tokens,
    }
