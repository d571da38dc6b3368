"""One trajectory, one group or one answer of an evaluation, token by token."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.chat.messages import ToolCall
from stretto.chat.transcripts import divide, find_calls
from stretto.errors import RunError
from stretto.store.blobs import read_parts
from stretto.view.curves import finite
from stretto.view.pieces import Pieces
from stretto.view.runs import RunSource

MOST_TOKENS = 32_768  # of a lineage that the page gets
MOST_RESULT = 4_000  # characters of what a tool returned
MOST_MEMBERS = 64  # of a group that stand side by side


def trajectory(run: RunSource, id: int, pieces: Pieces) -> dict[str, Any]:
    """Returns everything that is recorded of a trajectory. Raises `RunError` if there is none."""
    with run.reading() as db:
        return _trajectory(db, id, pieces)


def group(run: RunSource, id: int) -> dict[str, Any]:
    """Returns a group and its members, with their texts. Raises `RunError` if there is none."""
    with run.reading() as db:
        found = db.execute(
            "SELECT version, deadline, staleness, prompt_text, row, admitted_at, draw, row_number, task FROM groups "
            "WHERE group_id = ?",
            (id,),
        ).fetchone()
        if found is None:
            raise RunError(f"there is no group {id}")
        members = db.execute(
            "SELECT t.trajectory, t.member, t.state, t.reward, t.reward_parts, t.error, t.limit_reached, c.lineage, "
            "c.num_sampled, c.finish, c.text, "
            "(SELECT update_id FROM members m WHERE m.trajectory = t.trajectory AND use = 0 LIMIT 1) "
            "FROM trajectories t LEFT JOIN completions c USING (trajectory) WHERE t.group_id = ? "
            "ORDER BY t.member, c.lineage",
            (id,),
        ).fetchall()
    names = ("version", "deadline", "staleness", "prompt", "row", "admitted_at", "draw", "row_number", "task")
    by_member: dict[int, dict[str, Any]] = {}
    for each, member, state, reward, parts, error, limit, lineage, length, finish, text, update in members:
        own = by_member.setdefault(
            member,
            {"trajectory": each, "member": member, "state": state, "reward": reward, "reward_parts": _parts(parts),
             "error": error, "limit": limit, "update": update, "length": 0, "finish": finish, "texts": []},
        )  # fmt: skip
        if lineage is not None:
            own["length"] += length
            own["texts"].append(text)
    listed = list(by_member.values())
    return {
        "group": id,
        **dict(zip(names, found, strict=True)),
        "members": listed[:MOST_MEMBERS],
        "num_members": len(listed),
    }


def answer(run: RunSource, evaluation: int, index: int, greedy: bool, pieces: Pieces) -> dict[str, Any]:
    """Returns an answer of an evaluation. Raises `RunError` if there is none."""
    with run.reading() as db:
        rows = db.execute(
            "SELECT e.version, h.prompt_text, h.row, h.task, h.prompt_tokens, a.reward, a.reward_parts, a.error, "
            "a.lineage, 1, "
            "a.num_sampled, a.finish, NULL, NULL, a.turn_numbers, a.turns, a.text, a.context_text, a.context, "
            "a.tokens, a.logprobs, NULL FROM answers a JOIN held_out h ON h.id = a.prompt "
            "JOIN evaluations e ON e.id = a.evaluation "
            "WHERE a.evaluation = ? AND a.prompt_index = ? AND a.greedy = ? ORDER BY a.lineage",
            (evaluation, index, int(greedy)),
        ).fetchall()
    if not rows:
        raise RunError(f"evaluation {evaluation} has no answer to prompt {index}")
    version, prompt, row, task, prompt_tokens, reward, parts, error = rows[0][:8]
    return {
        "evaluation": evaluation,
        "index": index,
        "greedy": greedy,
        "version": version,
        "prompt": prompt,
        "row": row,
        "task": task,
        "num_prompt_tokens": len(prompt_tokens) // 4,
        "reward": finite(reward),
        "reward_parts": _parts(parts),
        "error": error,
        "has_pieces": pieces.path is not None,
        "lineages": [_lineage(each[8:], version, None, pieces) for each in rows if each[11] is not None],
    }


def _trajectory(db: sqlite3.Connection, id: int, pieces: Pieces) -> dict[str, Any]:
    head = db.execute(
        "SELECT t.group_id, t.member, t.version, t.state, t.instance, t.reward, t.scored_at, t.ended_at, t.error, "
        "t.turn_rewards, t.reward_parts, t.limit_reached, t.spent, g.prompt_text, g.row, g.deadline, g.admitted_at, "
        "length(g.prompt_tokens) / 4 FROM trajectories t JOIN groups g USING (group_id) WHERE t.trajectory = ?",
        (id,),
    ).fetchone()
    if head is None:
        raise RunError(f"there is no trajectory {id}")
    names = (
        *("group", "member", "version", "state", "instance", "reward", "scored_at", "ended_at", "error"),
        *("turn_rewards", "reward_parts", "limit", "spent", "prompt", "row", "deadline", "admitted_at"),
        "num_prompt_tokens",
    )
    found = dict(zip(names, head, strict=True))
    by_turn = found["turn_rewards"]
    found["turn_rewards"] = None if by_turn is None else np.frombuffer(by_turn, "<f8").tolist()
    found["reward_parts"] = _parts(found["reward_parts"])
    uses = db.execute(
        "SELECT update_id, use, lineage, position FROM members WHERE trajectory = ? ORDER BY use, lineage", (id,)
    ).fetchall()
    rows = db.execute(
        "SELECT lineage, train, num_sampled, finish, started_at, finished_at, turn_numbers, turns, text, context_text, "
        "context, tokens, logprobs, token_versions FROM completions WHERE trajectory = ? ORDER BY lineage",
        (id,),
    ).fetchall()
    lineages = []
    for row in rows:
        first = next((use for use in uses if use[1] == 0 and use[2] == row[0]), None)
        lineages.append(_lineage(row, found["version"], _values(db, first), pieces))
    transitions = db.execute(
        "SELECT from_state, to_state, at, reason FROM transitions WHERE trajectory = ? ORDER BY seq", (id,)
    ).fetchall()
    failures = db.execute("SELECT at, kind, reason FROM failures WHERE trajectory = ? ORDER BY id", (id,)).fetchall()
    return {
        "trajectory": id,
        **found,
        "update": uses[0][0] if uses else None,
        "uses": len({use[1] for use in uses}),
        "has_pieces": pieces.path is not None,
        "lineages": lineages,
        "transitions": [{"from": a, "to": b, "at": at, "reason": reason} for a, b, at, reason in transitions],
        "failures": [{"at": at, "kind": kind, "reason": reason} for at, kind, reason in failures],
    }


def _values(db: sqlite3.Connection, member: tuple[int, int, int, int] | None) -> Any:
    """Returns what the trainer computed for a lineage in its first update; None if that is not recorded."""
    if member is None:
        return None
    return db.execute(
        "SELECT logprobs, ratios, advantages, gradients FROM token_values WHERE update_id = ? AND position = ?",
        (member[0], member[3]),
    ).fetchone()


def _lineage(row: Any, version: int, values: Any, pieces: Pieces) -> dict[str, Any]:
    """Returns a lineage with arrays of its tokens. What the environment said has turn -1."""
    number, train, num_sampled, finish, started, finished, turn_numbers, turns, text, context_text, context = row[:11]
    tokens = np.frombuffer(row[11], "<i4")
    logprobs, versions = np.frombuffer(row[12], "<f4"), row[13]
    spans = [[0, len(tokens)]] if turns is None else np.frombuffer(turns, "<i4").reshape(-1, 2).tolist()
    numbers = list(range(len(spans))) if turn_numbers is None else np.frombuffer(turn_numbers, "<i4").tolist()
    of_turn = np.full(len(tokens), -1, dtype=np.int64)
    for turn, (start, end) in zip(numbers, spans, strict=False):
        of_turn[start:end] = turn
    shown = slice(0, MOST_TOKENS)
    own = tokens[shown].tolist()
    answer: dict[str, Any] = {
        "lineage": number,
        "train": bool(train),
        "num_sampled": num_sampled,
        "num_tokens": len(tokens),
        "finish": finish,
        "started_at": started,
        "finished_at": finished,
        "text": text,
        "context": None if context is None else context_text or "",
        "num_context_tokens": None if context is None else len(context) // 4,
        "turns": of_turn[shown].tolist(),
        "tokens": own,
        "pieces": pieces.of(own),
        "logprobs": _rounded(logprobs[shown]),
        "calls": _calls(own, spans, numbers, text, pieces),
        "versions": None if versions is None else np.frombuffer(versions, "<i4")[shown].tolist(),
        "values": None,
    }
    if values is not None:
        sampled = np.flatnonzero(of_turn >= 0)
        answer["values"] = {}
        for name, part in zip(("logprobs", "ratios", "advantages", "gradients"), values, strict=True):
            whole = np.full(len(tokens), np.nan, dtype=np.float32)
            found = np.frombuffer(part, "<f4")
            whole[sampled[: len(found)]] = found[: len(sampled)]
            answer["values"][name] = _rounded(whole[shown])
    return answer


def _calls(
    tokens: list[int], spans: list[list[int]], numbers: Sequence[int], text: str, pieces: Pieces
) -> list[dict[str, Any]]:
    """Returns the tools that a lineage calls, with the tokens of each call and what came back.

    Without a tokenizer they are read from the whole text: turn, tokens and result are None.
    """
    if pieces.path is None:
        return [
            _call(each.call) | {"turn": None, "start": None, "end": None, "result": None} for each in find_calls(text)
        ]
    shown = [[start, min(end, len(tokens))] for start, end in spans if start < len(tokens)]
    found = []
    for part in divide(tokens, shown, numbers[: len(shown)], lambda own: "".join(pieces.of(own) or ())):
        if not part.calls:
            continue
        ends = np.cumsum([len(piece) for piece in pieces.of(tokens[part.start : part.end]) or ()])
        for each in part.calls:
            start, end = np.searchsorted(ends, [each.start, each.end - 1], side="right").tolist()
            where = {"turn": part.turn, "start": part.start + start, "end": min(part.start + end + 1, part.end)}
            result = None if each.result is None else each.result[:MOST_RESULT]
            found.append(_call(each.call) | where | {"result": result})
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": call.name, "arguments": words, "error": call.error}


def _parts(text: str | None) -> list[dict[str, Any]] | None:
    """Returns the parts of a reward; None if it is one."""
    parts = read_parts(text)
    return None if parts is None else [part._asdict() for part in parts]


def _rounded(values: Any) -> list[float | None]:
    return [None if value != value else float(f"{value:.4g}") for value in values.tolist()]
