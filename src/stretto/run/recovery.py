"""Reads from its journal what a run was when it ended: the state of its core, and the rewards that its draws follow.

What the core decides in one step may be recorded in part only (a trajectory that failed for good after its last
attempt, a group that is filtered or dropped). `Journal.settle` completes such records, and is called first.
`store/resume_point.py` has the table of what is durable before what.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stretto.core.ledger import Counters, TrajectoryState
from stretto.core.plan import Plan
from stretto.core.reuse import ReusableGroup
from stretto.core.snapshots import GroupSnapshot, Snapshot, TrajectorySnapshot
from stretto.environments.mixed_prompts import DrawnGroup, MixedPrompts, Prompts
from stretto.environments.reward_range import BEYOND, MAX_REWARD, is_trainable
from stretto.errors import JournalError
from stretto.recipe.schema import Recipe
from stretto.run.phases import Phases
from stretto.store.reader import JournalReader
from stretto.store.schema import RESTORE, opened_readonly

# The state that a trajectory is restored with, by the state in the journal. Nothing runs before an instance has joined.
_RESTORED = {
    "waiting": TrajectoryState.WAITING,
    "running": TrajectoryState.WAITING,
    "scoring": TrajectoryState.SCORING,
    "scored": TrajectoryState.SCORED,
    "training": TrajectoryState.TRAINING,
    "failed": TrajectoryState.FAILED,
    "dropped": TrajectoryState.DROPPED,  # the surplus of a group whose other members go on
}


def snapshot(path: Path, plan: Plan) -> Snapshot:
    """Returns the state of the core that the journal tells of, as `Controller.restore` takes it."""
    with JournalReader(path) as reader:
        facts = reader.facts()
    phases = Phases.recorded(path)
    with opened_readonly(path) as db:
        (taken, finished), (num_groups,) = (
            db.execute("SELECT COUNT(*), COUNT(finished_at) FROM updates").fetchone(),
            db.execute("SELECT COUNT(*) FROM groups").fetchone(),
        )
        (newest,) = db.execute("SELECT MAX(version) FROM versions").fetchone()
        groups = _groups(db, plan, newest)
        training = [group for group in groups if _in_training(group)]
        outstanding = [group for group in groups if not _in_training(group)]
        waiting = {
            each.version
            for group in outstanding
            for each in group.trajectories
            if each.state is TrajectoryState.WAITING
        }
        due = _evaluations_due(db, plan, phases, newest)
        last = db.execute("SELECT staleness FROM groups ORDER BY group_id DESC LIMIT 1").fetchone()
        return Snapshot(
            paradigm=facts.paradigm,
            batch=facts.batch,
            group_size=facts.group,
            members=facts.group + facts.reserve_members,
            next_update=taken,
            next_group=num_groups,
            newest=newest,
            live=frozenset({newest, *waiting, *due}),
            staleness=last[0] if last else min(plan.staleness, 1),
            unpublished=finished if finished > newest else None,
            evaluations_due=due,
            counters=_counters(db, plan),
            outstanding=tuple(outstanding),
            finished=_finished(db, plan, outstanding),
            training=tuple(sorted(training, key=lambda group: (group.version, group.id))),
            filtered_in_a_row=_filtered_since_the_last_batch(db),
            reusable=_reusable(db, plan, finished),
            reused=_reused(db, plan, finished),
        )


def untrainable_rewards(path: Path) -> dict[int, str]:
    """Returns the scored and untrained trajectories whose recorded reward cannot be trained on, with the reasons.

    Such a reward is refused when it is scored. A run that is older than the bound may have recorded one.
    """
    with opened_readonly(path) as db:
        rows = db.execute(
            "SELECT trajectory, reward, turn_rewards FROM trajectories WHERE state IN ('scored', 'training') "
            "AND (turn_rewards IS NOT NULL OR ABS(reward) > ?) ORDER BY trajectory",
            (MAX_REWARD,),
        )
        found = {}
        for trajectory, reward, by_turn in rows:
            rewards = [reward, *([] if by_turn is None else np.frombuffer(by_turn, "<f8").tolist())]
            if wrong := [each for each in rewards if not is_trainable(each)]:
                found[trajectory] = f"the reward {wrong[0]:g} was recorded, {BEYOND}"
        return found


def recall_draws(path: Path, prompts: Prompts, recipe: Recipe | None = None) -> None:
    """Repeats to the prompts what was drawn, scored and trained, in its order: later draws follow from that.

    `recipe` is the one that the run goes on with, which several tasks have their shares from.
    """
    if isinstance(prompts, MixedPrompts):
        assert recipe is not None
        with opened_readonly(path) as db:
            drawn = db.execute("SELECT group_id, task, lost_before FROM groups ORDER BY group_id").fetchall()
        prompts.recall((DrawnGroup(*each) for each in drawn), _shares_since(path, recipe, len(drawn)))
    if not prompts.follows_rewards:
        return
    # If a reward or a batch was taken back and recorded again, only the last record counts.
    last = (
        "t.seq = (SELECT MAX(seq) FROM transitions l WHERE l.trajectory = t.trajectory AND l.from_state = '{}' "
        "AND l.to_state = '{}')"
    )
    with opened_readonly(path) as db:
        rows = db.execute(
            "SELECT t.from_state, t.to_state, g.row_number, x.reward, x.member, m.update_id, group_id, g.task "
            "FROM transitions t JOIN trajectories x USING (trajectory) JOIN groups g USING (group_id) "
            "LEFT JOIN (SELECT DISTINCT trajectory, update_id FROM members WHERE use = 0) m USING (trajectory) "
            "WHERE t.from_state IS NULL "
            f"OR (t.to_state = 'scored' AND x.reward IS NOT NULL AND {last.format('scoring', 'scored')}) "
            f"OR (t.to_state = 'training' AND m.update_id IS NOT NULL AND {last.format('scored', 'training')}) "
            "ORDER BY t.seq"
        )
        (group_size,) = db.execute("SELECT CAST(value AS INTEGER) FROM run WHERE key = 'group'").fetchone()
        num_scored = Counter[int]()  # by group; the core had dropped those that came after the first `group_size`
        for from_state, to_state, row, reward, member, update, group, task in rows:
            if to_state == "training":
                prompts.settle(update)
            elif to_state == "scored":
                num_scored[group] += 1
                if num_scored[group] <= group_size:
                    prompts.scored(row, reward, task)
            elif from_state is None and member == 0:
                prompts.drawn(row, task)


def _shares_since(path: Path, recipe: Recipe, num_groups: int) -> int:
    """Returns the first group that the shares of a recipe count: that of the phases at the end that have them."""
    since = num_groups
    with JournalReader(path) as reader:
        firsts = [phase.first_group for phase in reader.phases()]
    phases = Phases.recorded(path)
    for first, (_, each) in reversed(list(zip(firsts, () if phases is None else phases.parts, strict=True))):
        if each.shares != recipe.shares:
            break
        since = first
    return since


def _groups(db: sqlite3.Connection, plan: Plan, newest: int) -> list[GroupSnapshot]:
    """The groups with trajectories that have not ended, by id."""
    rows = db.execute(
        "SELECT g.group_id, g.version, g.deadline, t.trajectory, t.state, t.reward, "
        "(SELECT COUNT(*) FROM failures f WHERE f.trajectory = t.trajectory AND kind = 'generation'), "
        "(SELECT COUNT(*) FROM failures f WHERE f.trajectory = t.trajectory AND kind = 'scoring') "
        "FROM groups g JOIN trajectories t USING (group_id) WHERE g.group_id IN (SELECT group_id FROM trajectories "
        "WHERE state IN ('waiting', 'running', 'scoring', 'scored', 'training')) ORDER BY g.group_id, t.member"
    )
    facts: dict[int, tuple[int, int]] = {}  # group -> version, deadline
    members: dict[int, list[TrajectorySnapshot]] = {}
    for group, version, deadline, trajectory, recorded, reward, generation, scoring in rows:
        if recorded not in _RESTORED:
            raise JournalError(f"the journal has trajectory {trajectory} as `{recorded}`, which is no state: {RESTORE}")
        state = _RESTORED[recorded]
        # Under `continue` it continues under the newest version, which none of its tokens is newer than: a version is
        # on the disk as published before an engine has it. In the other paradigms it continues under its own.
        continues = not plan.paradigm.pinned and state is TrajectoryState.WAITING
        under = newest if continues else version
        facts[group] = (version, deadline)
        members.setdefault(group, []).append(TrajectorySnapshot(trajectory, under, state, generation, scoring, reward))
    return [GroupSnapshot(group, *facts[group], tuple(members[group])) for group in facts]


def _in_training(group: GroupSnapshot) -> bool:
    return any(each.state is TrajectoryState.TRAINING for each in group.trajectories)


def _finished(db: sqlite3.Connection, plan: Plan, outstanding: Iterable[GroupSnapshot]) -> tuple[int, ...]:
    """The outstanding groups that are finished, in the order of finishing.

    A group without signal is left out if the journal does not say that it was kept: the core decides on it again.
    """
    kept = {group for (group,) in db.execute("SELECT group_id FROM groups WHERE spared IS NOT NULL")}
    last: dict[int, int] = dict(
        db.execute(
            "SELECT group_id, MAX(seq) FROM transitions JOIN trajectories USING (trajectory) "
            "WHERE state IN ('scored', 'failed') GROUP BY group_id"
        )
    )
    finished = [
        group.id
        for group in outstanding
        if group.is_finished and (group.has_signal or not plan.filter_limit or group.id in kept)
    ]
    return tuple(sorted(finished, key=lambda group: last[group]))


def _filtered_since_the_last_batch(db: sqlite3.Connection) -> int:
    (count,) = db.execute(
        "SELECT COUNT(DISTINCT group_id) FROM transitions JOIN trajectories USING (trajectory) "
        "WHERE to_state = 'filtered' "
        "AND seq > (SELECT COALESCE(MAX(seq), 0) FROM transitions WHERE to_state = 'training')"
    ).fetchone()
    return int(count)


def _evaluations_due(db: sqlite3.Connection, plan: Plan, phases: Phases | None, newest: int) -> frozenset[int]:
    """The versions that were due and are not evaluated. A version is due by the recipe of the update that made it."""
    if not plan.evaluate_every:
        return frozenset()
    past = {version for (version,) in db.execute("SELECT version FROM evaluations WHERE kind <> 'before'")}
    if phases is None:
        due = range(plan.evaluate_every, min(newest, plan.updates - 1) + 1, plan.evaluate_every)
        return frozenset(version for version in due if version not in past)
    return frozenset(version for version in range(1, newest + 1) if version not in past and phases.evaluates(version))


def _reusable(db: sqlite3.Connection, plan: Plan, finished: int) -> tuple[ReusableGroup, ...]:
    """The trained groups that may be used again; `finished` updates are done."""
    if not plan.replay_groups:
        return ()
    rows = db.execute(
        "SELECT g.group_id, g.version, g.deadline, m.trajectory, (SELECT MAX(use) + 1 FROM members u "
        "WHERE u.trajectory = m.trajectory AND u.update_id < ?1) FROM members m JOIN trajectories USING (trajectory) "
        "JOIN groups g USING (group_id) WHERE m.use = 0 AND m.update_id < ?1 AND g.deadline >= ?1 "
        "GROUP BY m.trajectory ORDER BY g.group_id, MIN(m.position)",
        (finished,),
    )
    facts: dict[int, tuple[int, int, int]] = {}  # group -> version, deadline, uses
    members: dict[int, list[int]] = {}
    for group, version, deadline, trajectory, uses in rows:
        facts[group] = (version, deadline, uses)
        members.setdefault(group, []).append(trajectory)
    return tuple(
        ReusableGroup(group, version, deadline, tuple(members[group]), uses)
        for group, (version, deadline, uses) in facts.items()
        if uses <= plan.replay_uses
    )


def _reused(db: sqlite3.Connection, plan: Plan, finished: int) -> tuple[int, ...]:
    """The groups that the batch which was taken and not trained uses again."""
    if not plan.replay_groups:
        return ()
    rows = db.execute(
        "SELECT DISTINCT g.version, g.group_id FROM members JOIN trajectories USING (trajectory) JOIN groups g "
        "USING (group_id) WHERE use > 0 AND update_id >= ? ORDER BY 1, 2",
        (finished,),
    )
    return tuple(group for _, group in rows)


def _counters(db: sqlite3.Connection, plan: Plan) -> Counters:
    """The counts of the run, but for those that the journal does not have: `interrupted` and `moved` begin again."""

    def count(query: str, *args: object) -> int:
        return int(db.execute(query, args).fetchone()[0])

    tries = "SELECT COUNT(*) AS num FROM failures WHERE kind = ? GROUP BY trajectory"
    retried = f"SELECT COALESCE(SUM(MIN(num, ?)), 0) FROM ({tries})"
    states: dict[str, int] = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    whole = "SELECT COUNT(DISTINCT group_id) FROM trajectories WHERE state = ?"
    return Counters(
        admitted_groups=count("SELECT COUNT(*) FROM groups"),
        trained_groups=count(whole, "trained"),
        replaced_groups=count(
            "SELECT COUNT(*) FROM (SELECT 1 FROM trajectories GROUP BY group_id HAVING SUM(state <> 'failed') = 0)"
        ),
        dropped_groups=count(
            "SELECT COUNT(*) FROM (SELECT 1 FROM trajectories GROUP BY group_id "
            "HAVING SUM(state = 'dropped') AND NOT SUM(state NOT IN ('dropped', 'failed')))"
        ),
        filtered_groups=count(whole, "filtered"),
        spared_groups=count("SELECT COUNT(spared) FROM groups"),
        replayed_groups=count(
            "SELECT COUNT(*) FROM (SELECT DISTINCT update_id, group_id FROM members JOIN trajectories "
            "USING (trajectory) WHERE use > 0)"
        ),
        admitted=sum(states.values()),
        trained=states.get("trained", 0),
        failed=states.get("failed", 0),
        dropped=states.get("dropped", 0),
        filtered=states.get("filtered", 0),
        generation_retries=count(retried, plan.retries, "generation"),
        scoring_retries=count(retried, plan.retries, "scoring"),
        evaluations=count("SELECT COUNT(*) FROM evaluations WHERE kind = 'during'"),
        evaluations_skipped=count("SELECT COUNT(*) FROM evaluations WHERE kind = 'skipped'"),
    )
