"""What a run was when it was killed, from its journal: the core's state, its sums, and what its draws follow.

The journal is a prefix of what happened, so it may know less than the process did, by the changes of one commit. That
loses nothing, because of the order in which things become durable:

| first                               | then                             | if the run dies in between          |
|-------------------------------------|----------------------------------|-------------------------------------|
| a batch's members                   | its update begins                | the same members are trained        |
| a version's file, and its checksum  | an engine loads it, groups start | the update is replayed              |
| a group's admission, or not         | its tokens                       | same prompt, same seeds             |
| a completion, or not                | its reward                       | generated again: same version, seed |
| an update's end with the checksum   | its version is published         | published then                      |
| all updates before a checkpoint     | the checkpoint has its name      | an older one, more is replayed      |
| the end of all that needs a version | its file is removed              | the file is there, not needed       |
| a line of `metrics.jsonl`, or not   | its update's end is recorded     | the file is written again           |

What the core decides in one step may be recorded in part (a failure for good after its last try, a group that is
filtered or dropped); `Journal.settle` carries it out to its end, and is called first.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Any

from stretto.core.plan import Plan
from stretto.environments.data import PromptStream
from stretto.store.schema import connect_readonly

_STATES = {
    "running": "pending",
    "suspended": "pending",
    "scoring": "scoring",
    "scored": "scored",
    "training": "taken",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run had come."""

    updates: int  # finished: the version that the trainer has to come to
    checksums: dict[int, str]  # of every version that was made
    lines: list[dict[str, Any]]  # of `metrics.jsonl`; updates and evaluations each in order, whatever the clocks said
    totals: dict[str, Any]  # the sums of the run; those that the journal does not count are of the last update or stop
    evaluated: frozenset[str]  # the moments, of "before" and "after", that were evaluated


def recorded_checksums(path: Path) -> dict[int, str]:
    """The checksum of every version that was made, published or not; none where the run has not begun."""
    with _open(path) as db:
        return _checksums(db)


def progress_of(path: Path) -> Progress | None:
    """How far the run of a journal had come; None where it had not even its first version."""
    with _open(path) as db:
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
        moments = frozenset(kind for (kind,) in db.execute("SELECT DISTINCT kind FROM evaluations"))
        totals = _totals(db) | {"evaluations": [_without_kind(each) for each in evaluations]}
    return Progress(updates, checksums, list(merge(lines, evaluations, key=lambda line: line["at"])), totals, moments)


def snapshot(path: Path, plan: Plan) -> dict[str, Any]:
    """The core's state, as `Brain.restore` takes it."""
    with _open(path) as db:
        (taken, finished), (groups,) = (
            db.execute("SELECT COUNT(*), COUNT(finished_at) FROM updates").fetchone(),
            db.execute("SELECT COUNT(*) FROM groups").fetchone(),
        )
        (newest,) = db.execute("SELECT MAX(version) FROM versions").fetchone()
        outstanding, training = _groups(db, plan, newest)
        due = _evaluations_due(db, plan, newest)
        last = db.execute("SELECT staleness FROM groups ORDER BY group_id DESC LIMIT 1").fetchone()
        pending = {
            each["version"] for group in outstanding for each in group["trajectories"] if each["state"] == "pending"
        }
        return {
            "paradigm": plan.paradigm.name,
            "batch": plan.batch,
            "group_size": plan.group_size,
            "next_update": taken,
            "next_group": groups,
            "newest": newest,
            "live": sorted({newest, *pending, *due}),
            "staleness": last[0] if last else min(plan.staleness, 1),
            "unpublished": finished if finished > newest else None,
            "evaluations_due": due,
            "counters": _counters(db, plan),
            "outstanding": outstanding,
            "finished": _finished(db, plan, outstanding),
            "training": training,
            "filtered_in_a_row": _filtered_since_the_last_batch(db),
            "replay": _replay(db, plan, finished),
        }


def recall_draws(path: Path, prompts: PromptStream) -> None:
    """Tell the prompts what was drawn, scored and taken, in its order: later draws follow from that."""
    if not prompts.follows_rewards:
        return
    with _open(path) as db:
        rows = db.execute(
            "SELECT t.from_state, t.to_state, g.row_number, x.reward, x.member, m.update_id FROM transitions t "
            "JOIN trajectories x USING (trajectory) JOIN groups g USING (group_id) "
            "LEFT JOIN members m ON m.trajectory = t.trajectory AND m.use = 0 "
            "WHERE t.from_state IS NULL OR t.to_state IN ('scored', 'training') ORDER BY t.seq"
        )
        for from_state, to_state, row, reward, member, update in rows:
            if to_state == "training":
                prompts.settle(update)
            elif to_state == "scored":
                prompts.scored(row, reward)
            elif from_state is None and member == 0:
                prompts.drawn(row)


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    db = connect_readonly(path)
    try:
        yield db
    finally:
        db.close()


def _checksums(db: sqlite3.Connection) -> dict[int, str]:
    published = db.execute("SELECT version, checksum FROM versions")
    made = db.execute("SELECT update_id + 1, checksum FROM updates WHERE checksum IS NOT NULL")
    return dict(published) | dict(made)


def _without_kind(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "kind"}


# -- the core ----------------------------------------------------------------------------------------------------------


def _groups(db: sqlite3.Connection, plan: Plan, newest: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups that are outstanding by id, and those of the batch that was taken and not trained, by version."""
    rows = db.execute(
        "SELECT g.group_id, g.version, g.deadline, t.trajectory, t.state, t.reward, "
        "(SELECT COUNT(*) FROM failures f WHERE f.trajectory = t.trajectory AND kind = 'generation'), "
        "(SELECT COUNT(*) FROM failures f WHERE f.trajectory = t.trajectory AND kind = 'scoring') "
        "FROM groups g JOIN trajectories t USING (group_id) WHERE g.group_id IN (SELECT group_id FROM trajectories "
        "WHERE state IN ('running', 'suspended', 'scoring', 'scored', 'training')) ORDER BY g.group_id, t.member"
    )
    groups: dict[int, dict[str, Any]] = {}
    for group, version, deadline, trajectory, state, reward, generation, scoring in rows:
        # Under `continue` it goes on under whatever is newest; elsewhere under its own.
        under = version if plan.paradigm.pinned or _STATES[state] != "pending" else newest
        made = groups.setdefault(group, {"id": group, "version": version, "deadline": deadline, "trajectories": []})
        made["trajectories"].append(
            {
                "id": trajectory,
                "version": under,
                "state": _STATES[state],
                "generation_failures": generation,
                "scoring_failures": scoring,
                "reward": reward,
            }
        )
    taken = [each for each in groups.values() if any(one["state"] == "taken" for one in each["trajectories"])]
    ids = {each["id"] for each in taken}
    outstanding = [each for each in groups.values() if each["id"] not in ids]
    return outstanding, sorted(taken, key=lambda each: (each["version"], each["id"]))


def _finished(db: sqlite3.Connection, plan: Plan, outstanding: list[dict[str, Any]]) -> list[int]:
    """The outstanding groups that are finished, in the order of finishing.

    One whose last reward is recorded, and not whether it is filtered or spared, is left out: the core decides.
    """
    spared = {group for (group,) in db.execute("SELECT group_id FROM groups WHERE spared IS NOT NULL")}
    last = dict(
        db.execute(
            "SELECT group_id, MAX(seq) FROM transitions JOIN trajectories USING (trajectory) "
            "WHERE state IN ('scored', 'failed') GROUP BY group_id"
        )
    )
    finished = []
    for group in outstanding:
        states = {each["state"] for each in group["trajectories"]}
        if states <= {"scored", "failed"} and "scored" in states:
            signal = len({each["reward"] for each in group["trajectories"] if each["reward"] is not None}) > 1
            if signal or not plan.filter_limit or group["id"] in spared:
                finished.append(group["id"])
    return sorted(finished, key=lambda group: last[group])


def _filtered_since_the_last_batch(db: sqlite3.Connection) -> int:
    (count,) = db.execute(
        "SELECT COUNT(DISTINCT group_id) FROM transitions JOIN trajectories USING (trajectory) "
        "WHERE to_state = 'filtered' "
        "AND seq > (SELECT COALESCE(MAX(seq), 0) FROM transitions WHERE to_state = 'training')"
    ).fetchone()
    return int(count)


def _evaluations_due(db: sqlite3.Connection, plan: Plan, newest: int) -> list[int]:
    if not plan.evaluate_every:
        return []
    past = {version for (version,) in db.execute("SELECT version FROM evaluations WHERE kind IN ('during', 'skipped')")}
    due = range(plan.evaluate_every, min(newest, plan.updates - 1) + 1, plan.evaluate_every)
    return [version for version in due if version not in past]


def _replay(db: sqlite3.Connection, plan: Plan, finished: int) -> dict[str, Any]:
    """The groups that may be used again, and those that the batch which was taken and not trained uses again."""
    if not plan.replay_groups:
        return {"kept": [], "chosen": []}
    rows = db.execute(
        "SELECT g.group_id, g.version, g.deadline, m.trajectory, (SELECT MAX(use) + 1 FROM members u "
        "WHERE u.trajectory = m.trajectory AND u.update_id < ?1) FROM members m JOIN trajectories USING (trajectory) "
        "JOIN groups g USING (group_id) WHERE m.use = 0 AND m.update_id < ?1 AND g.deadline >= ?1 "
        "ORDER BY g.group_id, m.position",
        (finished,),
    )
    kept: dict[int, dict[str, Any]] = {}
    for group, version, deadline, trajectory, uses in rows:
        made = {"id": group, "version": version, "deadline": deadline, "trajectories": [], "uses": uses}
        kept.setdefault(group, made)["trajectories"].append(trajectory)
    chosen = db.execute(
        "SELECT DISTINCT g.version, g.group_id FROM members JOIN trajectories USING (trajectory) JOIN groups g "
        "USING (group_id) WHERE use > 0 AND update_id >= ? ORDER BY 1, 2",
        (finished,),
    )
    groups = [each for each in kept.values() if each["uses"] <= plan.replay_uses]
    return {"kept": groups, "chosen": [group for _, group in chosen]}


def _counters(db: sqlite3.Connection, plan: Plan) -> dict[str, int]:
    def count(query: str, *args: Any) -> int:
        return int(db.execute(query, args).fetchone()[0])

    tries = "SELECT COUNT(*) AS num FROM failures WHERE kind = ? GROUP BY trajectory"
    retried = f"SELECT COALESCE(SUM(MIN(num, ?)), 0) FROM ({tries})"
    states: dict[str, int] = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    whole = "SELECT COUNT(DISTINCT group_id) FROM trajectories WHERE state = ?"
    return {
        "admitted_groups": count("SELECT COUNT(*) FROM groups"),
        "trained_groups": count(whole, "trained"),
        "replaced_groups": count(
            "SELECT COUNT(*) FROM (SELECT 1 FROM trajectories GROUP BY group_id HAVING SUM(state <> 'failed') = 0)"
        ),
        "dropped_groups": count(whole, "dropped"),
        "filtered_groups": count(whole, "filtered"),
        "spared_groups": count("SELECT COUNT(spared) FROM groups"),
        "replayed_groups": count(
            "SELECT COUNT(*) FROM (SELECT DISTINCT update_id, group_id FROM members JOIN trajectories "
            "USING (trajectory) WHERE use > 0)"
        ),
        "admitted": sum(states.values()),
        "trained": states.get("trained", 0),
        "failed": states.get("failed", 0),
        "dropped": states.get("dropped", 0),
        "filtered": states.get("filtered", 0),
        "generation_retries": count(retried, plan.retries, "generation"),
        "scoring_retries": count(retried, plan.retries, "scoring"),
        "evaluations": count("SELECT COUNT(*) FROM evaluations WHERE kind = 'during'"),
        "evaluations_skipped": count("SELECT COUNT(*) FROM evaluations WHERE kind = 'skipped'"),
    }


# -- the sums ----------------------------------------------------------------------------------------------------------


def _last_totals(db: sqlite3.Connection) -> dict[str, Any]:
    """Those of the last update, or of a stop after it; by their order, as another machine's clock may be behind."""
    stop = db.execute("SELECT totals FROM sessions WHERE totals IS NOT NULL ORDER BY session DESC LIMIT 1").fetchone()
    done = db.execute("SELECT totals FROM updates WHERE totals IS NOT NULL ORDER BY update_id DESC LIMIT 1").fetchone()
    found: list[dict[str, Any]] = [json.loads(totals) for (totals,) in filter(None, (stop, done))]
    return max(found, key=lambda totals: totals["steps"], default={})


def _totals(db: sqlite3.Connection) -> dict[str, Any]:
    """The sums of the run. Seconds are those of the last update or stop; what ended since then is counted."""
    totals = _last_totals(db)
    lengths = "FROM trajectories LEFT JOIN completions USING (trajectory) WHERE state"
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
        "filtered": ended.get("filtered", (0, 0))[0],
        "filtered_tokens": ended.get("filtered", (0, 0))[1],
        "filtered_groups": groups,
        "filtered_reward": reward,
        "sampled": sampled,
        "sampled_tokens": sampled_tokens,
    }
