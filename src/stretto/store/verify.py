"""Verifies a run from its journal, with independent SQL: it uses no code that enforces the laws.

Two kinds of checks are made. The three laws and exactly-once are checked by versions, counts and order
(`law_checks.py`). The recorded data is checked by digests of what each update trained on, and by everything that
follows from it (`data_checks.py`). A law holds if none of its checks finds a break. The paradigms `partial` and `drop`
each give up one law by design, and so does a recipe with redundancy; those breaks are counted separately.

A run that is not finished (stopped, killed or active) may have trajectories in progress; they are counted.
"""

from __future__ import annotations

import json
import math
import reprlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from stretto.errors import JournalError
from stretto.store.blobs import read_parts
from stretto.store.data_checks import MAX_REWARD, DataResult, check_data, token_range
from stretto.store.law_checks import CHECKS
from stretto.store.mixture_checks import realised_shares
from stretto.store.overview import state_of
from stretto.store.phase_checks import CONFIG_NAME
from stretto.store.schema import (
    LAWS_GIVEN_UP,
    RESERVES,
    RESTORE,
    RESTORE_OR_BEGIN,
    check_whole,
    connect_readonly,
    journal_path,
    reading,
)
from stretto.types import FinishReason

NUM_DETAILS = 5  # offenders named for each law
SAY_EVERY = 2_048  # completions between two reports of progress
LOGPROB_SLACK = 1e-3  # a log-probability computed in low precision may be this much above 0
PARTS_ROUNDING = 1e-9  # of a weighted sum, relative to the largest of its parts
LOWEST_LOGPROB = -1_000.0  # no draw ever has a smaller one

NAMES = {
    "1": "law 1  one voice",
    "2": "law 2  nothing lost",
    "3": "law 3  nothing old",
    "once": "       exactly once",
    "data": "       recorded data",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one law. `details` has a sentence for each of the first breaks."""

    law: str  # "1", "2", "3", "once" or "data"
    broken: int  # breaks that neither the paradigm nor the recipe allows
    by_paradigm: int | None  # breaks that the paradigm makes by design; None: it does not give up this law
    counts: str  # what was checked, as text
    details: tuple[str, ...] = ()
    by_recipe: int | None = None  # breaks that the recipe asks for; None: it does not give up this law
    unrouted: int = 0  # of "data": trained samples whose record of routing is deleted

    @property
    def holds(self) -> bool:
        return self.broken == 0


@dataclass(slots=True)
class _Run:
    """The facts of the run, as parameters of the checks, and the breaks found so far."""

    how: str  # how the run ended, as text
    facts: dict[str, Any]
    params: dict[str, Any]
    breaks: dict[str, list[str]] = field(default_factory=lambda: {law: [] for law in NAMES})
    mixed: int = 0  # trajectories whose only break of law 1 is that they have tokens of other versions
    num_tokens: int = 0
    num_parts: int = 0  # trajectories whose reward has several parts


Say = Callable[[str, float], None]
"""Gets what `verify` does now, in words, and the share of its work that is done, from 0 to 1."""

SHARES = {"file": 0.1, "laws": 0.3, "tokens": 0.7}  # of the work, when that part is done; about


def verify(run_folder: str | Path, say: Say = lambda words, share: None) -> list[Finding]:
    """Checks the journal of a run. Returns one finding for each law, one for exactly-once and one for recorded data.

    Raises `RunError` if there is no journal, and `JournalError` if it cannot be read. `say` is told the progress.
    """
    path = journal_path(run_folder)
    db = connect_readonly(path)
    try:
        with reading(path):
            db.execute("BEGIN")  # one snapshot of a run that may be active
            say("reading the file", 0.0)
            check_whole(db, path)
            run = _read_run(db, path)
            for place, (law, query) in enumerate(CHECKS):
                say(
                    f"checking laws, {place} of {len(CHECKS)} checks done",
                    SHARES["file"] + (SHARES["laws"] - SHARES["file"]) * place / len(CHECKS),
                )
                run.breaks[law] += [str(sentence) for (sentence,) in db.execute(query, run.params)]
            _check_tokens(db, run, say)
            _check_lineages(db, run)
            _check_parts(db, run)
            (updates,) = db.execute("SELECT COUNT(*) FROM updates").fetchone()

            def done(num_updates: int) -> None:
                share = SHARES["tokens"] + (1 - SHARES["tokens"]) * num_updates / max(1, updates)
                say(f"comparing digests of what was trained on, {num_updates:,} of {updates:,} updates", share)

            data = check_data(db, path.parent, run.facts, done)
            run.breaks["data"] += data.breaks
            return _findings(db, run, data)
    finally:
        db.close()


def format_findings(findings: Sequence[Finding]) -> str:
    """Returns the findings as text: one line for each law, and below it the first breaks."""
    lines = []
    for finding in findings:
        verdict = "holds" if finding.holds else f"BROKEN {finding.broken}"
        for cause, count in (("paradigm", finding.by_paradigm), ("recipe", finding.by_recipe)):
            if count is not None:
                verdict = ("" if finding.holds else f"{verdict}, ") + f"broken by {cause}: {count};"
        lines.append(f"{NAMES[finding.law]:<20} {verdict:<10} {finding.counts}")
        lines += [f"{'':<20}   - {detail}" for detail in finding.details]
        if finding.broken > len(finding.details):
            lines.append(f"{'':<20}   - and {finding.broken - len(finding.details)} more")
    return "\n".join(lines)


def conclusion(findings: Sequence[Finding]) -> str:
    """Returns one line that says what was proved, and what only training or scoring again can prove."""
    if not all(finding.holds for finding in findings):
        return "not proved: the journal contradicts itself or its run folder, see above"
    proved = "proved: nothing that was trained on has changed since its update. A journal that was rewritten as a whole"
    if unrouted := sum(finding.unrouted for finding in findings):
        return (
            f"{proved}, digests included, cannot be found: `stretto replay` and `verify --recompute N` need the "
            f"records of routing, and those of {unrouted:,} trained samples are deleted; with "
            "`training.keep_routing = true` a run keeps them"
        )
    return (
        f"{proved}, digests included, is found only by `stretto replay` (weights) or `verify --recompute N` "
        "(log-probabilities)"
    )


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 0 if every law holds or is broken only as the paradigm or the recipe wants it, else 1."""
    return 0 if all(finding.holds for finding in findings) else 1


def _read_run(db: sqlite3.Connection, path: Path) -> _Run:
    facts = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM run")}
    names = (
        *("paradigm", "staleness", "batch", "group", "updates", "data_rows", "retries", "filter_limit", "order"),
        *("replay_groups", "replay_uses", "laws_broken"),
    )
    missing = [name for name in names if name not in facts]
    if missing:
        raise JournalError(f"journal `{path}` lacks facts of its run: no `{missing[0]}`; {RESTORE_OR_BEGIN}")
    last = db.execute("SELECT outcome FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
    outcome = last[0] if last else None
    params = {name: facts[name] for name in names if name != "laws_broken"}  # SQLite has no lists
    paradigm, given_up = facts["paradigm"], LAWS_GIVEN_UP.get(facts["paradigm"], ())
    if facts["laws_broken"] != list(given_up):
        raise JournalError(
            f"journal `{path}` says that its paradigm `{paradigm}` gives up laws {facts['laws_broken']}, and it gives "
            f"up laws {list(given_up)}: {RESTORE}"
        )
    params["engine"] = facts.get("engine", "native")
    params |= {name: facts.get(name, 0) for name in (*RESERVES, "dropped_rows")}  # a run may be older than these
    only = [None, facts["data_rows"], facts["order"], params["dropped_rows"], 0]
    params["tasks"] = json.dumps(facts.get("tasks") or [only])
    params |= {"members": params["group"] + params["reserve_members"], "drains": paradigm == "one-step-off"}
    params |= {"finished": outcome == "finished", "continues": 1 in given_up, "drops": 2 in given_up}
    how = f"run {state_of(path.resolve().parent, outcome)}"
    return _Run(how, facts, params)


def _check_tokens(db: sqlite3.Connection, run: _Run, say: Say) -> None:
    """Checks the arrays of tokens: law 1, the log-probabilities (law 2) and the age of single tokens (law 3)."""
    published: dict[int, set[str]] = {}  # one checksum each, except for versions that were lost and made again
    both = "SELECT version, checksum FROM versions UNION SELECT version, checksum FROM remade"
    for version, checksum in db.execute(both):
        published.setdefault(version, set()).add(checksum)
    rows = db.execute(
        "SELECT c.trajectory, t.version, c.version, c.checksum, c.num_tokens, c.tokens, c.logprobs, c.token_versions, "
        "c.supports, c.num_sampled, c.turns, t.reward, t.turn_rewards, c.finish, c.lineage, c.context, m.update_id, "
        "(SELECT MAX(u.update_id) FROM members u WHERE u.trajectory = c.trajectory), COALESCE(g.staleness, :staleness) "
        "FROM completions c JOIN trajectories t USING (trajectory) LEFT JOIN groups g USING (group_id) "
        "LEFT JOIN members m ON m.trajectory = c.trajectory AND m.lineage = c.lineage AND m.use = 0",
        run.params,
    )
    (count,) = db.execute("SELECT COUNT(*) FROM completions").fetchone()
    for place, row in enumerate(rows):
        if place % SAY_EVERY == 0:
            share = SHARES["laws"] + (SHARES["tokens"] - SHARES["laws"]) * place / max(1, count)
            say(f"checking tokens, {place:,} of {count:,} completions", share)
        if others := [f"trajectory {row[0]} {sentence}" for sentence in _other_types(row)]:
            run.breaks["data"] += others
            continue
        try:
            _check_row(run, row, published)
        except (TypeError, ValueError) as error:  # a column of another table has another type
            run.breaks["data"].append(f"trajectory {row[0]} has columns that cannot be read: {error}")


# The columns of `_check_tokens`, in order, with the types that the journal writes. SQLite stores any other too.
_COLUMNS: Sequence[tuple[str, tuple[type, ...]]] = (
    ("trajectory", (int,)), ("trajectories.version", (int,)), ("completions.version", (int,)), ("checksum", (str,)),
    ("num_tokens", (int,)), ("tokens", (bytes,)), ("logprobs", (bytes,)), ("token_versions", (bytes, NoneType)),
    ("supports", (bytes, NoneType)), ("num_sampled", (int,)), ("turns", (bytes, NoneType)),
    ("reward", (float, NoneType)), ("turn_rewards", (bytes, NoneType)), ("finish", (str,)), ("lineage", (int,)),
    ("context", (bytes, NoneType)),
)  # fmt: skip

_SQL_NAMES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


def _other_types(row: Sequence[Any]) -> Iterator[str]:
    """Returns the columns that hold something else than the journal writes."""
    for (name, types), value in zip(_COLUMNS, row, strict=False):
        if not isinstance(value, types):
            yield f"has {reprlib.repr(value)} in its column `{name}`, which is no {_SQL_NAMES[types[0]]}"


def _check_row(run: _Run, row: Sequence[Any], published: dict[int, set[str]]) -> None:
    """Checks one completion."""
    trajectory, version, stamp, checksum, num_tokens, tokens, logprobs, token_versions, supports, *rest = row
    num_sampled, turns, reward, turn_rewards, finish, lineage, context, update, last_update, staleness = rest
    name = _name(trajectory, lineage)
    run.num_tokens += num_sampled
    sizes = [len(part) for part in (tokens, logprobs, token_versions) if part is not None]
    if any(size != 4 * num_tokens for size in sizes):
        run.breaks["1"].append(f"{name} has {num_tokens} tokens and blobs of {sizes} bytes")
        return
    for column, part, size in (
        *(("supports", supports, 4), ("turns", turns, 8), ("turn_rewards", turn_rewards, 8)),
        ("context", context, 4),
    ):
        if part is not None and len(part) % size:
            run.breaks["data"].append(f"{name} has `{column}` of {len(part)} bytes, no multiple of {size}")
            return
    if context is not None and (not context or token_range(context, run.facts.get("vocabulary", 0))):
        run.breaks["data"].append(
            f"the context of {name} {token_range(context, run.facts.get('vocabulary', 0)) or 'is empty'}"
        )
    values = np.frombuffer(logprobs, "<f4")
    if not (np.isfinite(values).all() and (values <= LOGPROB_SLACK).all()):
        run.breaks["2"].append(f"{name} has log-probabilities that are not finite or above 0")
    elif (values < LOWEST_LOGPROB).any():
        run.breaks["data"].append(f"{name} has a log-probability of {values.min():g}, which none draws")
    if sentence := token_range(tokens, run.facts.get("vocabulary", 0)):
        run.breaks["data"].append(f"{name} {sentence}")
    if finish not in get_args(FinishReason):
        run.breaks["data"].append(f"{name} has the unknown finish `{finish}`")
    if last_update is not None and reward is not None and abs(reward) > MAX_REWARD:
        run.breaks["data"].append(f"{name} has the reward {reward:g}, beyond {MAX_REWARD:g}")
    if supports is not None and not _drawn_from(np.frombuffer(tokens, "<i4"), np.frombuffer(supports, "<i4")):
        run.breaks["2"].append(f"{name} has a token that is not among those it was drawn from")
    spans = np.array([[0, num_tokens]]) if turns is None else np.frombuffer(turns, "<i4").reshape(-1, 2)
    for sentence in _spans(spans, num_sampled, values):
        run.breaks["2"].append(f"{name} {sentence}")
    drawn = [version] if token_versions is None else np.frombuffer(token_versions, "<i4").tolist()
    mixed = any(other != version for other in drawn)
    faults = list(_voice(run, version, stamp, checksum, drawn if mixed else [version], published))
    if mixed and update is not None and drawn[-1] > update:
        faults.append(f"has tokens of version {drawn[-1]}, and update {update} trained on it")
    run.breaks["1"] += [f"{name} {sentence}" for sentence in faults]
    run.mixed += mixed and not faults
    # `law_checks.py` checks the age of the version; this checks a token that is older than the version.
    if mixed and last_update is not None and (oldest := min(drawn)) < min(version, last_update - staleness):
        run.breaks["3"].append(
            f"{name} of version {version} has a token of version {oldest} and is in the batch of "
            f"update {last_update}, {last_update - oldest} updates later; it was admitted under {staleness}"
        )


def _name(trajectory: int, lineage: int) -> str:
    return f"lineage {lineage} of trajectory {trajectory}" if lineage else f"trajectory {trajectory}"


def _check_lineages(db: sqlite3.Connection, run: _Run) -> None:
    """Checks the turns of each trajectory over all of its lineages, and their rewards (law 2)."""
    rows = db.execute(
        "SELECT trajectory, lineage, turns, turn_numbers, num_lineages, reward, turn_rewards FROM completions "
        "JOIN trajectories USING (trajectory) WHERE num_lineages IS NOT 1 OR turn_numbers IS NOT NULL OR lineage <> 0 "
        "OR turn_rewards IS NOT NULL ORDER BY trajectory, lineage"
    )
    for trajectory, own in groupby(rows, key=itemgetter(0)):
        try:
            found = list(_episode(list(own)))
        except (TypeError, ValueError):
            continue  # the checks of columns name it
        run.breaks["2"] += [f"trajectory {trajectory} {sentence}" for sentence in found]


def _check_parts(db: sqlite3.Connection, run: _Run) -> None:
    """Checks that a reward of several parts is their weighted sum (law 2)."""
    rows = db.execute("SELECT trajectory, reward, reward_parts FROM trajectories WHERE reward_parts IS NOT NULL")
    for trajectory, reward, text in rows:
        run.num_parts += 1
        try:
            parts = read_parts(text) or ()
            values = [part.weight * part.value for part in parts if part.value is not None]
            total = math.fsum(values)
            scale = max([1.0, *map(abs, values)])
            wrong = not values or not math.isclose(
                reward, total, rel_tol=PARTS_ROUNDING, abs_tol=PARTS_ROUNDING * scale
            )
        except (TypeError, ValueError, OverflowError) as error:  # no JSON, or other values in it
            run.breaks["data"].append(f"trajectory {trajectory} has parts of a reward that cannot be read: {error}")
            continue
        if wrong:
            run.breaks["2"].append(
                f"trajectory {trajectory} has a reward of {reward}, and the weighted sum of its "
                f"{len(values)} parts is {total}"
            )


def _episode(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Returns what is wrong with the turns of one trajectory; `rows` are its lineages."""
    num_turns, numbers = 0, list[int]()
    num_lineages, reward, turn_rewards = rows[0][4:]
    for _, lineage, turns, given, *_ in rows:
        own = 1 if turns is None else len(turns) // 8
        num_turns += own
        if given is None:
            numbers += range(own)
            continue
        found = np.frombuffer(given, "<i4").tolist()
        if len(found) != own or found != sorted(found):
            yield f"has {own} turns in lineage {lineage}, and they have the numbers {found}"
        numbers += found
    if sorted(numbers) != list(range(num_turns)):
        yield f"has {num_turns} turns in {num_lineages} lineages, and they have the numbers {sorted(numbers)}"
    yield from _by_turn(num_turns, reward, turn_rewards)


def _spans(spans: NDArray[np.int32], num_sampled: int, logprobs: NDArray[np.float32]) -> Iterator[str]:
    """Returns what is wrong with the turns of a trajectory.

    Turns must follow one another, the last must end with the tokens, and together they are the sampled tokens.
    """
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
        yield "has log-probabilities of tokens between its turns, which were observed and not sampled"


def _by_turn(num_turns: int, reward: float | None, turn_rewards: bytes | None) -> Iterator[str]:
    if turn_rewards is None:
        return
    rewards = np.frombuffer(turn_rewards, "<f8").tolist()
    if len(rewards) != num_turns:
        yield f"has {num_turns} turns and rewards of {len(rewards)}"
    elif reward != math.fsum(rewards):
        yield f"has a reward of {reward}, and those of its turns add up to {math.fsum(rewards)}"


def _drawn_from(tokens: NDArray[np.int32], supports: NDArray[np.int32]) -> bool:
    """Tells if each token occurs exactly once in its support."""
    counts, members = supports[: len(tokens)], supports[len(tokens) :]
    if len(counts) != len(tokens) or (counts < 1).any() or int(counts.sum()) != len(members):
        return False
    owners = np.repeat(np.arange(len(tokens)), counts)
    return np.array_equal(owners[members == tokens[owners]], np.arange(len(tokens)))


def _voice(
    run: _Run, version: int, stamp: int, checksum: str, drawn: list[int], published: dict[int, set[str]]
) -> Iterator[str]:
    """Returns what is wrong with the versions of a trajectory's tokens.

    Under `partial`, tokens may have different versions if no token has an older version than the one before it. The
    checksum is of the weights that sampled the last token.
    """
    mixed = drawn != [version]
    if mixed and not run.params["continues"]:
        others = [other for other in drawn if other != version]
        yield f"of version {version} has {len(others)} tokens of other versions, the first of {others[0]}"
    elif back := next(((newer, older) for newer, older in pairwise(drawn) if older < newer), None):
        yield f"of version {version} has a token of version {back[1]} after one of version {back[0]}"
    elif drawn[0] < version:
        yield f"of version {version} has tokens of version {drawn[0]}, which is older"
    own = {version, *drawn} if mixed else {version}
    if stamp not in own:
        yield f"of version {version} was generated under version {stamp}"
    elif checksum not in published.get(last := drawn[-1], ()):
        recorded = " or ".join(sorted(published.get(last, ()))) or "not published"
        yield f"was generated by weights {checksum}, version {last} is {recorded}"


def _findings(db: sqlite3.Connection, run: _Run, data: DataResult) -> list[Finding]:
    def one(query: str) -> Any:
        return db.execute(query).fetchone()

    states = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    training = states.get("training", 0)
    in_training = f", {training:,} of them in the batch of an unfinished update" if training else ""
    ends = [f"{states.pop(end, 0):,} {end}" for end in ("trained", "failed", "filtered")]
    dropped, in_progress = states.pop("dropped", 0), sum(states.values())
    (versions,) = one("SELECT COUNT(*) FROM versions")
    (completions,) = one("SELECT COUNT(*) FROM completions")
    (uses,) = one("SELECT COUNT(*) FROM members")
    age = sum(age * count for age, count in data.ages.items()) / max(1, data.ages.total())
    once, again = one(
        "SELECT COALESCE(SUM(use = 0), 0), COALESCE(SUM(use <> 0), 0) FROM members JOIN updates USING (update_id) "
        "WHERE finished_at IS NOT NULL"
    )
    updates, groups = one(
        "SELECT COUNT(DISTINCT update_id), COUNT(DISTINCT group_id) FROM updates JOIN members USING (update_id) "
        "JOIN trajectories USING (trajectory) WHERE finished_at IS NOT NULL AND use = 0"
    )
    (sessions,) = one("SELECT COUNT(*) FROM sessions")
    (anew,) = one("SELECT COUNT(DISTINCT at) FROM transitions WHERE from_state = 'training' AND to_state = 'scored'")
    (remade,) = one("SELECT COUNT(DISTINCT version) FROM remade")
    counts = {
        "1": f"{completions:,} completions, {run.num_tokens:,} tokens, {versions:,} versions",
        "2": f"{', '.join(ends)}, {dropped:,} dropped, {in_progress:,} in progress{in_training} ({run.how}); "
        f"{groups:,} groups in {updates:,} updates",
        "3": f"{uses:,} samples, age mean {age:.2f} max {max(data.ages, default=0)}, bound {run.params['staleness']}",
        "once": f"{once:,} trained once, {again:,} later uses",
        "data": f"digests of {data.num_updates:,} updates and {data.num_samples:,} samples, metrics, sums and seeds",
    }
    if not data.has_config:
        counts["data"] += f"; not the configuration: there is no `{CONFIG_NAME}`"
    if taken := uses - once - again:
        counts["once"] += f", {taken:,} in the batch of an unfinished update"
    (phases,) = one("SELECT COUNT(*) FROM phases")
    if phases > 1:
        counts["data"] += f", recipes of {phases:,} phases"
    if sessions > 1:
        counts["2"] += f"; resumed {'once' if sessions == 2 else f'{sessions - 1:,} times'}"
    if anew:
        counts["2"] += f"; batches returned and taken again: {anew:,}"
    several, untrained = one("SELECT COUNT(*), COALESCE(SUM(train = 0), 0) FROM completions WHERE turn_numbers NOTNULL")
    if several:
        counts["2"] += (
            f"; {several:,} lineages of trajectories with more than one, {untrained:,} of them not to be trained"
        )
    if run.num_parts:
        counts["2"] += f"; weighted sums of rewards: {run.num_parts:,}"
    if shares := realised_shares(db):
        counts["2"] += "; shares of tasks: " + ", ".join(f"{label} {share:.2%}" for label, _, share in shares)
    (by_receipt,) = one("SELECT COUNT(*) FROM completions WHERE receipts NOTNULL")
    if by_receipt:
        (receipts,) = one("SELECT COUNT(*) FROM receipts")
        served = ", ".join(name for (name,) in db.execute("SELECT DISTINCT served_by FROM receipts ORDER BY 1"))
        counts["1"] += f"; {by_receipt:,} of the completions by receipt ({receipts:,} receipts of {served})"
    if remade:
        counts["1"] += f", {remade:,} of them made again with other bits"
    excused = {"1": run.mixed if run.params["continues"] else None, "2": dropped if run.params["drops"] else None}
    by_recipe = {"2": dropped} if any(run.params[name] for name in RESERVES) else {}
    return [
        Finding(
            law,
            len(breaks),
            excused.get(law),
            counts[law],
            tuple(breaks[:NUM_DETAILS]),
            by_recipe.get(law),
            data.num_unrouted if law == "data" else 0,
        )
        for law, breaks in run.breaks.items()
    ]
