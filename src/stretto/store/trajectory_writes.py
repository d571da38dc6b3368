"""The changes that a journal records of groups and their trajectories."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from stretto.store.blobs import CompletionBlobs, blob, parts_text, storable
from stretto.store.routing_files import run_folder, write_record
from stretto.store.run_writes import note
from stretto.store.schema import Attempt, State
from stretto.store.transition_writes import change_state
from stretto.store.update_writes import remove_batch
from stretto.types import EpisodeLimit, Lineage, Prompt, RewardPart


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


def group_spared(db: sqlite3.Connection, group: int, update: int, text: str, at: float) -> None:
    """Keeps a group without signal for the batch of `update`, because the limit of filtered groups is reached."""
    db.execute("UPDATE groups SET spared = ? WHERE group_id = ?", (update, group))
    note(db, "filter limit", text, at)


def state_changed(
    db: sqlite3.Connection,
    trajectory: int,
    to_state: State,
    at: float,
    reason: str = "",
    instance: int | None = None,
) -> None:
    """Changes the state of a trajectory, and its instance if one is given."""
    change_state(db, trajectory, to_state, at, reason)
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
    change_state(db, trajectory, "scoring", at)
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
    change_state(db, trajectory, "scored", at)
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
        remove_batch(db, trajectory, at)
    change_state(db, trajectory, "scoring", at, reason)
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
    change_state(db, trajectory, end, at, reason)
    db.execute(
        "UPDATE trajectories SET ended_at = ?, error = ?, lost_tokens = ? WHERE trajectory = ?",
        (at, storable(reason) or None, lost_tokens, trajectory),
    )


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
