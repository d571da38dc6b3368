"""Writes the answers of an evaluation to the journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from hashlib import blake2b

from stretto.store.blobs import CompletionBlobs, blob, parts_text, storable
from stretto.types import HeldOutAnswer


def write_answers(db: sqlite3.Connection, evaluation: int, answers: Sequence[HeldOutAnswer]) -> None:
    """Stores what a version answered. A prompt is stored once, with the first evaluation that asks it."""
    for answer in answers:
        tokens = blob(answer.prompt.tokens, "<i4")
        prompt = _prompt_id(db, answer, tokens)
        error = None if answer.error is None else storable(answer.error)
        head = (evaluation, answer.index, prompt, int(answer.greedy))
        scored = (answer.reward, parts_text(answer.reward_parts), error)
        insert = "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        if not answer.lineages:  # it failed before its first token
            nothing = (0, 0, *scored, 0, 0, None, None, None, "", None, None, b"", b"")
            db.execute(insert, (*head, *nothing))
        for number, lineage in enumerate(answer.lineages):
            made, context = lineage.completion, blob(lineage.context, "<i4")
            arrays, own = CompletionBlobs.of(made), context != tokens
            text = answer.contexts[number] if own else None
            numbers = None if lineage.turn_numbers is None else blob(lineage.turn_numbers, "<i4")
            db.execute(
                insert,
                (
                    *(*head, number, len(answer.lineages), *scored),
                    *(len(made.tokens), made.num_sampled, made.finish, numbers, arrays.turns),
                    *(storable(answer.texts[number]), None if text is None else storable(text)),
                    *(context if own else None, arrays.tokens, arrays.logprobs),
                ),
            )


def _prompt_id(db: sqlite3.Connection, answer: HeldOutAnswer, tokens: bytes) -> int:
    """Returns the id of a prompt, which is stored if it is new."""
    prompt, row = answer.prompt, json.dumps(dict(answer.prompt.row), default=str)
    digest = blake2b(tokens + b"\0" + row.encode("utf-8", "replace"), digest_size=16).hexdigest()
    db.execute(
        "INSERT OR IGNORE INTO held_out (prompt_index, digest, prompt_text, prompt_tokens, row, task) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (answer.index, digest, storable(prompt.text), tokens, row, prompt.task),
    )
    (id,) = db.execute(
        "SELECT id FROM held_out WHERE prompt_index = ? AND digest = ?", (answer.index, digest)
    ).fetchone()
    return int(id)
