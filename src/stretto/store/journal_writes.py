"""The changes of a journal: one function each, which is the only declaration of that change.

`Journal` has a method of the same name and parameters (without `db`) that records the change. The writer's thread calls
the function later, in the transaction of the changes around it. `at` is the time of the change, in seconds since 1970.

A change that contradicts the journal (a second end, a completion of a trajectory that was never admitted) is an error.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from stretto import __version__
from stretto.errors import JournalError
from stretto.store.answer_writes import storable, write_answers
from stretto.store.blobs import CompletionBlobs, blob, parts_text
from stretto.store.digests import sample_digest, untrained_digest, update_digest
from stretto.store.routing_files import remove_records, run_folder, sync_records, write_record
from stretto.store.schema import (
    ENDS,
    FAILURES_OF_MEMBERS,
    PHASES,
    UNTRAINED_OF_MEMBERS,
    Attempt,
    Departure,
    EvaluationKind,
    RunFacts,
    State,
)
from stretto.types import EpisodeLimit, HeldOutAnswer, Lineage, Prompt, Receipt, RewardPart, Sample, TokenReport

_NOT_ENDED = f"state NOT IN {ENDS!r}"
_LAST = "COALESCE((SELECT MAX(seq) FROM transitions), 0)"
_SESSION = "(SELECT MAX(session) FROM sessions)"


def json_or_null(values: Mapping[str, Any] | None) -> str | None:
    """Returns the JSON of a mapping, or None for a NULL."""
    return None if values is None else json.dumps(dict(values))


# -- the run and its versions ------------------------------------------------------------------------------------------


def begin(db: sqlite3.Connection, facts: RunFacts, at: float, recipe: str | None = None) -> None:
    """Starts a session with the facts of the run. With a `recipe`, a phase begins with the next update."""
    values = {**dataclasses.asdict(facts), "stretto_version": __version__}
    db.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])
    db.execute("INSERT INTO sessions (started_at) VALUES (?)", (at,))
    if recipe is not None:
        db.execute(
            "INSERT INTO phases SELECT (SELECT COUNT(*) FROM phases), (SELECT COUNT(finished_at) FROM updates), "
            "(SELECT COUNT(*) FROM groups), ?, ?, ?",
            (at, json.dumps(dataclasses.asdict(facts)), storable(recipe)),
        )


def based_on(db: sqlite3.Connection, checksum: str) -> None:
    """Records the checksum of the base model that the adapters of a LoRA run belong to."""
    db.execute("INSERT OR REPLACE INTO run VALUES ('base', ?)", (json.dumps(checksum),))


def scored_by(db: sqlite3.Connection, sources: Mapping[str, str]) -> None:
    """Records the digests of the source files that score the task from now on."""
    db.execute("INSERT OR REPLACE INTO run VALUES ('sources', ?)", (json_or_null(sources),))


def read_from(db: sqlite3.Connection, data: Mapping[str, Any]) -> None:
    """Records what the prompts are made from: `train` and `evaluation`, digests by name, and `chat_template`.

    The last is the text of the template that the recipe asks for, or None.
    """
    db.execute("INSERT OR REPLACE INTO run VALUES ('data', ?)", (json_or_null(data),))


def finished(db: sqlite3.Connection, stopped: bool, at: float, totals: Mapping[str, Any] | None = None) -> None:
    """Ends the session: all updates are done, or (`stopped`) the run was asked to stop. `totals` are its sums."""
    db.execute(
        f"UPDATE sessions SET ended_at = ?, outcome = ?, totals = ? WHERE session = {_SESSION}",
        (at, "stopped" if stopped else "finished", json_or_null(totals)),
    )


def ended_by(db: sqlite3.Connection, error: str, at: float) -> None:
    """Ends the session by an error, unless it has ended already."""
    db.execute(
        f"UPDATE sessions SET ended_at = ?, outcome = 'failed', error = ? WHERE session = {_SESSION} "
        "AND outcome IS NULL",
        (at, error),
    )


def settle(
    db: sqlite3.Connection, retries: int, drops: bool, at: float, wanted: int = 0, last_update: int | None = None
) -> None:
    """Completes the decisions of a killed run that were only partly recorded.

    A trajectory whose last attempt failed becomes `failed`. A group that is partly filtered becomes `filtered`. With
    `drops`, trajectories past their deadline become `dropped`, and all others once the batch of `last_update` is taken.
    If groups have more trajectories than the `wanted` ones, those that a group with so many rewards does not need
    become `dropped`. Without such decisions, nothing changes.
    """
    tried = db.execute(
        "SELECT trajectory, (SELECT reason FROM failures f WHERE f.trajectory = t.trajectory ORDER BY id DESC LIMIT 1) "
        f"FROM trajectories t WHERE {_NOT_ENDED} AND trajectory IN "
        "(SELECT trajectory FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > ?)",
        (retries,),
    )
    for trajectory, reason in tried.fetchall():
        failed(db, trajectory, reason, at)
    if wanted:
        _drop_surplus(db, wanted, at)
    half_filtered = db.execute(
        "SELECT trajectory, (SELECT error FROM trajectories f WHERE f.group_id = t.group_id AND f.state = 'filtered') "
        "FROM trajectories t WHERE state = 'scored' AND group_id IN "
        "(SELECT group_id FROM trajectories WHERE state = 'filtered')"
    )
    for trajectory, reason in half_filtered.fetchall():
        filtered(db, trajectory, reason or "", at)
    if drops:
        past = db.execute(
            "SELECT trajectory, SUM(num_sampled) FROM trajectories t JOIN groups USING (group_id) "
            f"LEFT JOIN completions USING (trajectory) WHERE {_NOT_ENDED} AND state <> 'training' "
            "AND (deadline <= (SELECT MAX(update_id) FROM updates) OR ? IN (SELECT update_id FROM updates)) "
            "GROUP BY trajectory",
            (last_update,),
        )
        reason = "past its age limit" if last_update is None else "in reserve, and not needed"
        for trajectory, num_sampled in past.fetchall():
            dropped(db, trajectory, reason, at, num_sampled)
    _settle_losses(db, at)


def _settle_losses(db: sqlite3.Connection, at: float) -> None:
    """Completes what is recorded of lost groups of several tasks: the loss without its ends, or the ends alone."""
    unfinished = db.execute(
        "SELECT trajectory, SUM(num_sampled) FROM trajectories JOIN groups USING (group_id) "
        f"LEFT JOIN completions USING (trajectory) WHERE lost_before IS NOT NULL AND {_NOT_ENDED} GROUP BY trajectory"
    )
    for trajectory, num_sampled in unfinished.fetchall():
        dropped(db, trajectory, "counted as lost", at, num_sampled)
    if db.execute("SELECT 1 FROM run WHERE key = 'order' AND value = '\"mixed\"'").fetchone():
        db.execute(
            "UPDATE groups SET lost_before = (SELECT COUNT(*) FROM groups) WHERE lost_before IS NULL AND group_id NOT "
            "IN (SELECT group_id FROM trajectories WHERE state NOT IN ('failed', 'filtered', 'dropped'))"
        )


def _drop_surplus(db: sqlite3.Connection, wanted: int, at: float) -> None:
    """Drops what groups with enough rewards do not need: what has no reward, and what was scored after the others."""
    rows = db.execute(
        "SELECT group_id, trajectory, state, (SELECT MAX(seq) FROM transitions s WHERE s.trajectory = t.trajectory "
        "AND s.to_state = 'scored'), (SELECT SUM(num_sampled) FROM completions c WHERE c.trajectory = t.trajectory) "
        "FROM trajectories t WHERE state NOT IN ('failed', 'dropped') AND group_id IN (SELECT group_id FROM "
        f"trajectories WHERE {_NOT_ENDED}) ORDER BY group_id, trajectory"
    )
    members: dict[int, list[tuple[int, str, int, int | None]]] = {}
    for group, *member in rows.fetchall():
        members.setdefault(group, []).append((member[0], member[1], member[2] or 0, member[3]))
    for own in members.values():
        chosen = [each for each in own if each[1] in ("training", "trained", "filtered")]
        scored = sorted((each for each in own if each[1] == "scored"), key=lambda each: each[2])
        kept = {each[0] for each in [*chosen, *scored][: max(wanted, len(chosen))]}
        if len(kept) < wanted:
            continue
        for trajectory, _, _, num_sampled in own:
            if trajectory not in kept:
                dropped(db, trajectory, f"surplus: {len(kept)} others of its group were scored first", at, num_sampled)


def version_published(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that a version exists, with the checksum of its weights."""
    db.execute(
        f"INSERT OR IGNORE INTO versions (version, checksum, published_at, published_after) VALUES (?, ?, ?, {_LAST})",
        (version, checksum, at),
    )
    _expect_checksum(db, version, checksum, "published")


def version_made_again(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that lost weights of a version were made again with other bits. The old checksum is kept too."""
    db.execute(
        "INSERT INTO remade SELECT update_id + 1, checksum, ? FROM updates WHERE update_id + 1 = ? AND checksum <> ?",
        (at, version, checksum),
    )
    db.execute("UPDATE updates SET checksum = ? WHERE update_id = ?", (checksum, version - 1))
    db.execute("UPDATE versions SET checksum = ? WHERE version = ?", (checksum, version))


def version_loaded(db: sqlite3.Connection, version: int, checksum: str, at: float) -> None:
    """Records that an engine confirmed the checksum of a version. The first time is kept."""
    db.execute(
        f"UPDATE versions SET loaded_at = ?, loaded_after = {_LAST} WHERE version = ? AND loaded_at IS NULL",
        (at, version),
    )
    _expect_checksum(db, version, checksum, "loaded")


def receipt_given(db: sqlite3.Connection, instance: int, receipt: Receipt, at: float) -> None:
    """Records the receipt of an engine that loaded a version."""
    db.execute(
        "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            receipt.id,
            instance,
            receipt.version,
            receipt.checksum,
            receipt.num_tokens,
            receipt.mean_difference,
            receipt.largest_difference,
            receipt.tolerance,
            receipt.served_by,
            at,
            receipt.layout,
            receipt.held,
        ),
    )


def _expect_checksum(db: sqlite3.Connection, version: int, checksum: str, what: str) -> None:
    recorded = db.execute("SELECT checksum FROM versions WHERE version = ?", (version,)).fetchone()
    if recorded != (checksum,):
        was = recorded[0] if recorded else "never published"
        raise JournalError(f"version {version} was {what} with checksum {checksum}, but is recorded as {was}")


# -- groups and trajectories -------------------------------------------------------------------------------------------


def group_admitted(
    db: sqlite3.Connection,
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
    instances: Sequence[int] | None = None,
    task_index: int | None = None,
) -> None:
    """Starts a group: its trajectories, in the order of members and with one seed and instance each, are `running`.

    `row_number` is the row of the data set, from 0, and `draw` why it was drawn. `epoch` is None if rows are drawn by
    pass rate. `task_index` is its place among the groups of its task; None: among all groups.
    """
    tokens = blob(prompt.tokens, "<i4")
    row = json.dumps(dict(prompt.row), default=str)  # only to read: a resumed run draws its prompts from the task
    numbers = (group, epoch, prompt.index, row_number, version, deadline, staleness)
    db.execute(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, NULL)",
        (
            *numbers,
            storable(prompt.text),
            tokens,
            row,
            at,
            draw,
            prompt.task,
            group if task_index is None else task_index,
        ),
    )
    db.executemany(
        "INSERT INTO trajectories (trajectory, group_id, member, version, seed, state, instance) "
        "VALUES (?, ?, ?, ?, ?, 'running', ?)",
        [
            (trajectory, group, member, version, seed, None if instances is None else instances[member])
            for member, (trajectory, seed) in enumerate(zip(trajectories, seeds, strict=True))
        ],
    )
    db.executemany(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) VALUES (?, NULL, 'running', ?, '')",
        [(trajectory, at) for trajectory in trajectories],
    )


def group_lost(db: sqlite3.Connection, group: int) -> None:
    """Counts a group of a mixture as lost, before the next group is admitted: one of its task replaces it."""
    db.execute(
        "UPDATE groups SET lost_before = (SELECT COUNT(*) FROM groups) WHERE group_id = ? AND lost_before IS NULL",
        (group,),
    )


def _change_state(db: sqlite3.Connection, trajectory: int, to_state: State, at: float, reason: str = "") -> None:
    """Records a transition from the current state. Raises `JournalError` after an end."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
        f"SELECT trajectory, state, ?, ?, ? FROM trajectories WHERE trajectory = ? AND {_NOT_ENDED}",
        (to_state, at, storable(reason), trajectory),
    )
    if added.rowcount != 1:
        found = db.execute("SELECT state FROM trajectories WHERE trajectory = ?", (trajectory,)).fetchone()
        was = "was never admitted" if found is None else f"has already ended as `{found[0]}`"
        raise JournalError(f"trajectory {trajectory} {was} and cannot become `{to_state}`")
    db.execute("UPDATE trajectories SET state = ? WHERE trajectory = ?", (to_state, trajectory))


def _change_members(db: sqlite3.Connection, update: int, to_state: State, at: float, only: str = "") -> int:
    """Changes the state of the first uses in a batch, in order, with two statements; returns how many changed."""
    added = db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) SELECT t.trajectory, t.state, ?, ?, '' "
        "FROM members m JOIN trajectories t USING (trajectory) "
        f"WHERE m.update_id = ? AND m.use = 0 AND t.{_NOT_ENDED} {only} GROUP BY t.trajectory ORDER BY MIN(m.position)",
        (to_state, at, update),
    )
    db.execute(
        f"UPDATE trajectories AS t SET state = ? WHERE t.{_NOT_ENDED} {only} AND t.trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (to_state, update),
    )
    return added.rowcount


def state_changed(
    db: sqlite3.Connection,
    trajectory: int,
    to_state: State,
    at: float,
    reason: str = "",
    instance: int | None = None,
) -> None:
    """Changes the state of a trajectory, and its instance if one is given."""
    _change_state(db, trajectory, to_state, at, reason)
    db.execute("UPDATE trajectories SET instance = COALESCE(?, instance) WHERE trajectory = ?", (instance, trajectory))


def attempt_failed(db: sqlite3.Connection, trajectory: int, kind: Attempt, reason: str, at: float) -> None:
    """Records a failed attempt to generate or to score a trajectory. Another attempt or `failed` follows."""
    db.execute(
        "INSERT INTO failures (trajectory, kind, at, reason) VALUES (?, ?, ?, ?)",
        (trajectory, kind, at, storable(reason)),
    )


def generated(
    db: sqlite3.Connection,
    trajectory: int,
    lineages: Sequence[Lineage],
    texts: Sequence[str],
    at: float,
    contexts: Sequence[str | None] | None = None,
) -> None:
    """Stores the lineages of a trajectory, which has its last token and is `scoring` now.

    `texts` are those of the completions. `contexts` are those of the contexts that are not the prompt of the group.
    """
    _change_state(db, trajectory, "scoring", at)
    (prompt,) = db.execute(
        "SELECT prompt_tokens FROM groups JOIN trajectories USING (group_id) WHERE trajectory = ?", (trajectory,)
    ).fetchone()
    contexts = contexts or [None] * len(lineages)
    for number, (lineage, text, context_text) in enumerate(zip(lineages, texts, contexts, strict=True)):
        completion, context = lineage.completion, blob(lineage.context, "<i4")
        arrays, own = CompletionBlobs.of(completion), context != prompt
        if completion.routing is not None:
            write_record(run_folder(db), trajectory, number, completion.routing)
        db.execute(
            "INSERT INTO completions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                trajectory,
                number,
                int(lineage.train),
                completion.version,
                completion.checksum,
                len(completion.tokens),
                completion.num_sampled,
                completion.finish,
                completion.started_at,
                completion.finished_at,
                completion.prefilled,
                json.dumps(completion.receipts) if completion.receipts else None,
                None if lineage.turn_numbers is None else blob(lineage.turn_numbers, "<i4"),
                arrays.turns,
                storable(text),
                storable(context_text) if own and context_text is not None else None,
                context if own else None,
                arrays.tokens,
                arrays.logprobs,
                arrays.token_versions,
                arrays.supports,
                arrays.routing,
            ),
        )
    db.execute("UPDATE trajectories SET num_lineages = ? WHERE trajectory = ?", (len(lineages), trajectory))


def scored(
    db: sqlite3.Connection,
    trajectory: int,
    reward: float,
    at: float,
    turns: tuple[float, ...] | None = None,
    parts: tuple[RewardPart, ...] | None = None,
) -> None:
    """Gives a trajectory its reward, and the rewards of its turns or the parts of its reward if it has them."""
    _change_state(db, trajectory, "scored", at)
    by_turn = None if turns is None else blob(turns, "<f8")
    db.execute(
        "UPDATE trajectories SET reward = ?, scored_at = ?, turn_rewards = ?, reward_parts = ? WHERE trajectory = ?",
        (float(reward), at, by_turn, parts_text(parts), trajectory),
    )


def episode_limited(db: sqlite3.Connection, trajectory: int, limit: EpisodeLimit | None, spent: float) -> None:
    """Notes the limit that the episode of a trajectory has reached, if any, and what it has spent."""
    row = (limit, spent or None, trajectory)
    db.execute("UPDATE trajectories SET limit_reached = ?, spent = ? WHERE trajectory = ?", row)


def score_again(db: sqlite3.Connection, trajectory: int, reason: str, at: float, num_failures: int = 1) -> None:
    """Takes back a recorded reward that cannot be trained on, and counts it as `num_failures` failed attempts.

    The trajectory is `scoring` again. If it is in a batch that was not trained, that batch is removed: its members are
    `scored` again, and its update takes a new batch.
    """
    if db.execute("SELECT 1 FROM trajectories WHERE trajectory = ? AND state = 'training'", (trajectory,)).fetchone():
        _remove_batch(db, trajectory, at)
    _change_state(db, trajectory, "scoring", at, reason)
    db.execute(
        "UPDATE trajectories SET reward = NULL, scored_at = NULL, turn_rewards = NULL, reward_parts = NULL "
        "WHERE trajectory = ?",
        (trajectory,),
    )
    for _ in range(num_failures):
        attempt_failed(db, trajectory, "scoring", reason, at)
    # Its group may have to be filtered now.
    db.execute(
        "UPDATE groups SET spared = NULL WHERE group_id = (SELECT group_id FROM trajectories WHERE trajectory = ?)",
        (trajectory,),
    )


def _remove_batch(db: sqlite3.Connection, trajectory: int, at: float) -> None:
    """Removes the batch of a trajectory that was taken and not trained. Its members are `scored` again."""
    (update,) = db.execute(
        "SELECT update_id FROM members JOIN updates USING (update_id) "
        "WHERE trajectory = ? AND use = 0 AND finished_at IS NULL",
        (trajectory,),
    ).fetchone()
    reason = f"the batch of update {update} is taken again"
    db.execute(
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
        "SELECT trajectory, state, 'scored', ?, ? FROM members JOIN trajectories USING (trajectory) "
        "WHERE update_id = ? AND use = 0 GROUP BY trajectory ORDER BY MIN(position)",
        (at, reason, update),
    )
    db.execute(
        "UPDATE trajectories SET state = 'scored' WHERE trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (update,),
    )
    db.execute("DELETE FROM members WHERE update_id = ?", (update,))
    db.execute("DELETE FROM updates WHERE update_id = ?", (update,))


def failed(db: sqlite3.Connection, trajectory: int, reason: str, at: float, num_tokens: int = 0) -> None:
    """Ends a trajectory as `failed`. `num_tokens` were sampled and are in no completion."""
    _end(db, trajectory, "failed", reason, at, num_tokens or None)


def filtered(db: sqlite3.Connection, trajectory: int, reason: str, at: float) -> None:
    """Ends a scored trajectory as `filtered`: its group has no signal, and the recipe replaces such groups."""
    _end(db, trajectory, "filtered", reason, at, None)


def dropped(db: sqlite3.Connection, trajectory: int, reason: str, at: float, num_tokens: int | None = None) -> None:
    """Ends a trajectory as `dropped` (the `drop` paradigm, or redundancy). `num_tokens` were sampled so far."""
    _end(db, trajectory, "dropped", reason, at, num_tokens)


def _end(db: sqlite3.Connection, trajectory: int, end: State, reason: str, at: float, lost_tokens: int | None) -> None:
    _change_state(db, trajectory, end, at, reason)
    db.execute(
        "UPDATE trajectories SET ended_at = ?, error = ?, lost_tokens = ? WHERE trajectory = ?",
        (at, storable(reason) or None, lost_tokens, trajectory),
    )


def group_spared(db: sqlite3.Connection, group: int, update: int, text: str, at: float) -> None:
    """Keeps a group without signal for the batch of `update`, because the limit of filtered groups is reached."""
    db.execute("UPDATE groups SET spared = ? WHERE group_id = ?", (update, group))
    note(db, "filter limit", text, at)


def trajectory_moved(
    db: sqlite3.Connection,
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
    """Records that a trajectory moved to another instance, with `num_bytes` of KV or `prefilled` tokens."""
    db.execute(
        "INSERT INTO moves (at, trajectory, version, source, target, context, num_bytes, prefilled, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (at, trajectory, version, source, target, context, num_bytes, prefilled, reason),
    )


# -- updates and evaluations -------------------------------------------------------------------------------------------


def batch_taken(
    db: sqlite3.Connection,
    update: int,
    trajectories: Sequence[int],
    at: float,
    uses: Sequence[int] | None = None,
    lineages: Sequence[int] | None = None,
) -> None:
    """Makes these trajectories, in this order, the batch of `update`. Await `durable()` before it trains.

    A trajectory comes once for each of its `lineages` that is trained; None means that each has lineage 0 alone. `uses`
    is 0 for a trajectory that is trained for the first time, and counts up each time it is used again; None means all
    0. If a killed run had recorded the same batch, nothing changes; another batch is an error.
    """
    uses, lineages = uses or (0,) * len(trajectories), lineages or (0,) * len(trajectories)
    members = list(zip(trajectories, uses, lineages, strict=True))
    taken = _members(db, update)
    if taken:
        if taken != members:
            raise JournalError(f"update {update} has a recorded batch, and is about to train another one")
        return
    if routed := _routed(db, "trajectory IN (SELECT value FROM json_each(?))", json.dumps(list(trajectories))):
        sync_records(run_folder(db), routed)
    db.execute("INSERT INTO updates (update_id, taken_at) VALUES (?, ?)", (update, at))
    db.executemany(
        "INSERT INTO members (update_id, position, trajectory, use, lineage) VALUES (?, ?, ?, ?, ?)",
        [(update, position, *member) for position, member in enumerate(members)],
    )
    first_uses = list(dict.fromkeys(trajectory for trajectory, use, _ in members if use == 0))
    if _change_members(db, update, "training", at) != len(first_uses):
        for trajectory in first_uses:  # raises for the one that has ended
            _change_state(db, trajectory, "training", at)


def routing_forgotten(db: sqlite3.Connection, before: int | None) -> None:
    """Deletes the records of routing of trajectories that have ended and whose last update is before `before`.

    None: of all. The journal keeps their stamps.
    """
    trained = (
        ""
        if before is None
        else (
            " AND COALESCE((SELECT MAX(update_id) FROM members m WHERE m.trajectory = c.trajectory), -1) < ?"
            f" AND (SELECT state FROM trajectories t WHERE t.trajectory = c.trajectory) IN {ENDS}"
        )
    )
    if routed := _routed(db, f"1{trained}", *(() if before is None else (before,))):
        remove_records(run_folder(db), routed)


def _routed(db: sqlite3.Connection, where: str, *args: object) -> list[tuple[int, int]]:
    """Returns trajectory and lineage of the completions with a record of routing."""
    query = f"SELECT trajectory, lineage FROM completions c WHERE routing IS NOT NULL AND {where}"
    return db.execute(query, args).fetchall()


def _members(db: sqlite3.Connection, update: int) -> list[tuple[int, int, int]]:
    """Returns trajectory, use and lineage of the members of a batch, in order."""
    query = "SELECT trajectory, use, lineage FROM members WHERE update_id = ? ORDER BY position"
    return db.execute(query, (update,)).fetchall()


def update_done(
    db: sqlite3.Connection,
    update: int,
    metrics: Mapping[str, Any],
    at: float,
    checksum: str | None = None,
    totals: Mapping[str, Any] | None = None,
    samples: Sequence[Sample] | None = None,
    advantages: str | None = None,
) -> None:
    """Finishes `update`: every member of its batch ends as `trained`.

    `checksum` is that of the weights that it made, version `update + 1`; `totals` are the sums of the run. `samples`
    are those that the trainer was given, whose digest is recorded; `advantages` is the digest of their advantages.
    """
    row = (checksum, advantages, json_or_null(metrics), json_or_null(totals))
    done = db.execute(
        "UPDATE updates SET finished_at = ?, checksum = ?, advantages = ?, metrics = ?, totals = ? WHERE update_id = ?",
        (at, *row, update),
    )
    if done.rowcount != 1:
        raise JournalError(f"update {update} is done, but its batch was never recorded")
    if samples is not None:
        _seal(db, update, samples, row)
    _change_members(db, update, "trained", at, only="AND t.state = 'training'")
    db.execute(
        "UPDATE trajectories SET ended_at = ? WHERE state = 'trained' AND ended_at IS NULL AND trajectory IN "
        "(SELECT trajectory FROM members WHERE update_id = ? AND use = 0)",
        (at, update),
    )


def _seal(db: sqlite3.Connection, update: int, samples: Sequence[Sample], row: Sequence[str | None]) -> None:
    """Records the digests of what an update trained on. Raises `JournalError` if that is not its recorded batch."""
    members = [(sample.trajectory, sample.use, sample.lineage) for sample in samples]
    if _members(db, update) != members:
        raise JournalError(f"update {update} has a recorded batch, and has trained another one")
    before = db.execute("SELECT digest FROM updates WHERE update_id = ?", (update - 1,)).fetchone()
    failures = db.execute(FAILURES_OF_MEMBERS, (update, update)).fetchall()
    untrained = list(map(untrained_digest, db.execute(UNTRAINED_OF_MEMBERS, (update, update))))
    digests = b"".join(map(sample_digest, samples))
    digest = update_digest(
        before[0] if before else None, update, members, digests,
        failures=[each[1:] for each in failures], row=row, untrained=untrained,
        phases=db.execute(PHASES, (update, update)).fetchall(),
    )  # fmt: skip
    db.execute("UPDATE updates SET samples = ?, digest = ? WHERE update_id = ?", (digests, digest, update))


def evaluation(
    db: sqlite3.Connection,
    version: int,
    kind: EvaluationKind,
    at: float,
    reward: float | None = None,
    num: int = 0,
    seconds: float = 0.0,
    line: Mapping[str, Any] | None = None,
    answers: Sequence[HeldOutAnswer] = (),
) -> None:
    """Records an evaluation of `version` over `num` prompts with its mean reward, or that it was skipped.

    `line` is its line of `metrics.jsonl`.
    """
    added = db.execute(
        "INSERT INTO evaluations (version, kind, at, reward, num, seconds, line) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (version, kind, at, reward, num, seconds, json_or_null(line)),
    )
    write_answers(db, added.lastrowid or 0, answers)


def token_values(db: sqlite3.Connection, update: int, values: Sequence[TokenReport]) -> None:
    """Records what the trainer computed for the tokens of an update, by the position of their sample in the batch."""
    db.executemany(
        "INSERT OR REPLACE INTO token_values VALUES (?, ?, ?, ?, ?, ?)",
        [
            (
                update,
                each.position,
                *(blob(part, "<f4") for part in (each.logprobs, each.ratios, each.advantages, each.gradients)),
            )
            for each in values
        ],
    )


# -- instances and notes -----------------------------------------------------------------------------------------------


def instance_joined(db: sqlite3.Connection, instance: int, slots: int, at: float) -> None:
    """Records an instance that takes part in this session, with its version slots."""
    db.execute(
        f"INSERT INTO instances (session, instance, slots, joined_at) VALUES ({_SESSION}, ?, ?, ?)",
        (instance, slots, at),
    )


def instance_left(db: sqlite3.Connection, instance: int, outcome: Departure, reason: str, at: float) -> None:
    """Records that an instance takes part no more."""
    db.execute(
        f"UPDATE instances SET left_at = ?, outcome = ?, reason = ? WHERE session = {_SESSION} AND instance = ?",
        (at, outcome, storable(reason), instance),
    )


def note(db: sqlite3.Connection, kind: str, text: str, at: float) -> None:
    """Records something for a person to read: a wait, a failed attempt to write a checkpoint."""
    db.execute("INSERT INTO notes (at, kind, text) VALUES (?, ?, ?)", (at, kind, storable(text)))


def status(db: sqlite3.Connection, state: Mapping[str, Any], at: float) -> None:
    """Replaces the record of what the run does now, and who waits for what."""
    db.execute("INSERT OR REPLACE INTO status VALUES (0, ?, ?)", (at, storable(json.dumps(dict(state)))))
