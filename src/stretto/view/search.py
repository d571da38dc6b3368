"""Search among the trajectories of a run, and among the answers of its evaluations.

Numbers are compared in arrays, at once. A text is looked for in prompts and completions, from the newest trajectory to
the oldest: a call looks for about `TEXT_S` seconds and returns a cursor, with which the next call goes on.
"""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.chat.transcripts import find_calls
from stretto.errors import RunError
from stretto.view.columns import FINISHES, STATES, Columns
from stretto.view.curves import finite, task_labels
from stretto.view.pieces import Pieces
from stretto.view.runs import RunSource

TEXT_S = 0.4  # of one call
TEXT_CHUNK = 512  # trajectories whose text is read at once
MOST_ROWS = 500
EXCERPT = 160  # characters of a prompt or completion in a list

SORTS = ("newest", "oldest", "reward", "-reward", "length", "-length", "age", "-age")


@dataclass(frozen=True, slots=True)
class Query:
    """A search. Bounds include their ends; None: any."""

    update: tuple[float, float] | None = None
    version: tuple[float, float] | None = None
    group: tuple[float, float] | None = None
    reward: tuple[float, float] | None = None
    length: tuple[float, float] | None = None
    age: tuple[float, float] | None = None
    finish: str | None = None
    state: str | None = None
    failed: bool = False  # only those with a failed attempt
    task: str = ""  # only those of the task with this label
    text: str = ""
    tool: str = ""  # only those that call this tool; `*`: any tool
    sort: str = "newest"
    limit: int = 100
    cursor: int = 0  # results, or with a text or tool the candidates, that came before

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise RunError(f"`sort` is `{self.sort}`: give one of {', '.join(SORTS)}")
        if self.state is not None and self.state not in STATES:
            raise RunError(f"`state` is `{self.state}`: give one of {', '.join(STATES)}")
        if self.finish is not None and self.finish not in FINISHES[1:]:
            raise RunError(f"`finish` is `{self.finish}`: give one of {', '.join(FINISHES[1:])}")
        if not 1 <= self.limit <= MOST_ROWS or self.cursor < 0:
            raise RunError(f"`limit` is {self.limit} and `cursor` {self.cursor}: give 1 to {MOST_ROWS}, and 0 or more")


def search(run: RunSource, query: Query, pieces: Pieces) -> dict[str, Any]:
    """Returns one page of the trajectories that a query finds, with a cursor for the next one.

    `matching` counts those that fit by their numbers; with a text or a tool, `looked_at` of them were read so far.
    `pieces` decodes the turns of trajectories, where calls are looked for.
    """
    with run.columns(wanted=_wanted(run, query)) as (columns, progress):
        ids = _matching(columns, query)
        if query.task:
            ids = ids[np.isin(columns["group"][ids], _groups_of(run, query.task))]
        cursor, done = query.cursor + query.limit, True
        found = ids[query.cursor : cursor].tolist()
        if query.text or query.tool:
            found, cursor, done = _with_text(run, ids, query, pieces)
        rows = [_row(columns, id) for id in found]
    _add_excerpts(run, rows)
    more = cursor < len(ids) if done else True
    return {
        "rows": rows,
        "cursor": cursor if more else None,
        "matching": len(ids),
        "looked_at": min(cursor, len(ids)),
        "page_is_full": len(rows) >= query.limit,
        "read": progress.num_read,
        "all": progress.num_all,
    }


def _groups_of(run: RunSource, task: str) -> NDArray[np.int64]:
    """Returns the groups of the task with a label. Raises `RunError` if the run has no such task."""
    with run.reading() as db:
        if task not in (known := task_labels(db)):
            has = f"give one of {', '.join(known)}" if known else "the task of this run has no label"
            raise RunError(f"`task` is `{task}`: {has}")
        return np.fromiter(
            (group for (group,) in db.execute("SELECT group_id FROM groups WHERE task = ?", (task,))), "i8"
        )


def _wanted(run: RunSource, query: Query) -> tuple[int, int] | None:
    """Returns the trajectories that a query certainly needs, from the first to the last; None if that is unknown."""
    if query.update is not None:
        return run.trained_in(*query.update)
    if query.group is not None and query.group[0] == query.group[1]:
        with run.reading() as db:
            found = db.execute(
                "SELECT MIN(trajectory), MAX(trajectory) FROM trajectories WHERE group_id = ?", query.group[:1]
            ).fetchone()
        return None if found[0] is None else (found[0], found[1])
    return None


def _matching(columns: Columns, query: Query) -> NDArray[np.int64]:
    fits = columns["exists"] == 1
    ages = columns["update"] - columns["version"]
    for values, bounds in (
        *((columns["update"], query.update), (columns["version"], query.version), (columns["group"], query.group)),
        *((columns["reward"], query.reward), (columns["length"], query.length), (ages, query.age)),
    ):
        if bounds is not None:
            with np.errstate(invalid="ignore"):
                fits &= (values >= bounds[0]) & (values <= bounds[1])
    if query.age is not None:
        fits &= columns["update"] >= 0
    if query.finish is not None:
        fits &= columns["finish"] == FINISHES.index(query.finish)
    if query.state is not None:
        fits &= columns["state"] == STATES.index(query.state)
    if query.failed:
        fits &= (columns["failures"] > 0) | (columns["error"] > 0)
    ids = np.flatnonzero(fits)
    if query.sort in ("newest", "oldest"):
        return ids[::-1] if query.sort == "newest" else ids
    name = query.sort.lstrip("-")
    keys = (ages if name == "age" else columns[name])[ids].astype(np.float64)
    keys = np.where(np.isnan(keys), math.inf, -keys if query.sort.startswith("-") else keys)
    return ids[np.argsort(keys, kind="stable")]


def _with_text(run: RunSource, ids: NDArray[np.int64], query: Query, pieces: Pieces) -> tuple[list[int], int, bool]:
    """Returns those with the text and the tool, the place where the next call begins, True if all were looked at."""
    until, found, place = time.monotonic() + TEXT_S, list[int](), query.cursor
    pattern = f"%{_escaped(query.text)}%"
    having_text = "EXISTS (SELECT 1 FROM completions c WHERE c.trajectory = t.trajectory AND c.text LIKE ? ESCAPE '\\')"
    where, values = f"(g.prompt_text LIKE ? ESCAPE '\\' OR {having_text})", [pattern, pattern]
    if query.tool:  # a call has the name as a JSON string behind `"name"`; which texts are calls, the parser says
        where = f"{where} AND {having_text}"
        values.append(f'%"name"%{_escaped("" if query.tool == "*" else query.tool)}%')
    with run.reading() as db:
        while place < len(ids) and len(found) < query.limit and time.monotonic() < until:
            chunk = ids[place : place + TEXT_CHUNK].tolist()
            marks = ",".join("?" * len(chunk))
            rows = db.execute(
                "SELECT t.trajectory FROM trajectories t JOIN groups g USING (group_id) "
                f"WHERE t.trajectory IN ({marks}) AND {where}",
                (*chunk, *values),
            ).fetchall()
            having = {id for (id,) in rows if not query.tool or _calls(db, id, query.tool, pieces)}
            for offset, id in enumerate(chunk):
                if id in having:
                    found.append(id)
                    if len(found) == query.limit:
                        return found, place + offset + 1, place + offset + 1 >= len(ids)
            place += len(chunk)
    return found, place, place >= len(ids)


def _calls(db: sqlite3.Connection, id: int, tool: str, pieces: Pieces) -> bool:
    """True if a trajectory calls a tool."""
    rows = db.execute("SELECT tokens, turns, text FROM completions WHERE trajectory = ?", (id,))
    for tokens, turns, text in rows:
        found = tuple(find_calls(text))
        if pieces.path is not None and turns is not None:  # a call without tags is a whole turn
            own = np.frombuffer(tokens, "<i4").tolist()
            spans = np.frombuffer(turns, "<i4").reshape(-1, 2).tolist()
            found += tuple(each for a, b in spans for each in find_calls("".join(pieces.of(own[a:b]) or ())))
        if any(tool in ("*", each.call.name) for each in found):
            return True
    return False


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _row(columns: Columns, id: int) -> dict[str, Any]:
    update = int(columns["update"][id])
    return {
        "trajectory": id,
        "group": int(columns["group"][id]),
        "version": int(columns["version"][id]),
        "update": None if update < 0 else update,
        "age": None if update < 0 else update - int(columns["version"][id]),
        "state": STATES[int(columns["state"][id])],
        "reward": finite(float(columns["reward"][id])),
        "length": int(columns["length"][id]),
        "finish": FINISHES[int(columns["finish"][id])],
        "lineages": int(columns["lineages"][id]),
        "failures": int(columns["failures"][id]),
        "seconds": finite(float(columns["finished"][id] - columns["started"][id])),
    }


def _add_excerpts(run: RunSource, rows: list[dict[str, Any]]) -> None:
    """Adds the beginnings of prompts and completions, and errors."""
    if not rows:
        return
    marks = ",".join(str(row["trajectory"]) for row in rows)
    with run.reading() as db:
        texts = {
            id: rest
            for id, *rest in db.execute(
                "SELECT t.trajectory, substr(g.prompt_text, -?1), (SELECT substr(c.text, 1, ?1) FROM completions c "
                "WHERE c.trajectory = t.trajectory AND c.lineage = 0), t.error, g.task FROM trajectories t "
                f"JOIN groups g USING (group_id) WHERE t.trajectory IN ({marks})",
                (EXCERPT,),
            )
        }
    for row in rows:
        prompt, text, error, task = texts.get(row["trajectory"], ("", None, None, None))
        row |= {"prompt": prompt, "text": text, "error": error, "task": task}


# -- evaluations -------------------------------------------------------------------------------------------------------


def answers(run: RunSource, evaluation: int, *, greedy: bool | None, text: str, reward: tuple[float, float] | None,
            limit: int, cursor: int, task: str = "") -> dict[str, Any]:  # fmt: skip
    """Returns one page of the answers of an evaluation."""
    where, values = "a.evaluation = ? AND a.lineage = 0", list[Any]([evaluation])
    if greedy is not None:
        where, values = f"{where} AND a.greedy = ?", [*values, int(greedy)]
    if reward is not None:
        where, values = f"{where} AND a.reward BETWEEN ? AND ?", [*values, *reward]
    if task:
        where, values = f"{where} AND h.task = ?", [*values, task]
    if text:
        where += " AND (a.text LIKE ? ESCAPE '\\' OR h.prompt_text LIKE ? ESCAPE '\\')"
        values += [f"%{_escaped(text)}%"] * 2
    join = "FROM answers a JOIN held_out h ON h.id = a.prompt"
    limit = max(1, min(limit, MOST_ROWS))
    with run.reading() as db:
        (count,) = db.execute(f"SELECT COUNT(*) {join} WHERE {where}", values).fetchone()
        rows = db.execute(
            "SELECT a.prompt_index, a.greedy, a.reward, a.num_sampled, a.finish, a.error, a.num_lineages, "
            f"substr(h.prompt_text, -{EXCERPT}), substr(a.text, 1, {EXCERPT}), h.task {join} WHERE {where} "
            "ORDER BY a.prompt_index, a.greedy LIMIT ? OFFSET ?",
            (*values, limit, cursor),
        ).fetchall()
    names = ("index", "greedy", "reward", "length", "finish", "error", "lineages", "prompt", "text", "task")
    return {
        "rows": [dict(zip(names, row, strict=True)) for row in rows],
        "matching": count,
        "cursor": cursor + limit if cursor + limit < count else None,
    }
