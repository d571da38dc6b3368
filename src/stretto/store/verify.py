"""Proves the three laws of a run from its journal alone, with its own SQL: nothing here asks the code that kept them.

A check is a query that returns one sentence for each break; a law holds when none of its checks finds any. The
paradigms `partial` and `drop` give up one law each by design: what they break of it is counted apart.

A run that is not finished (stopped, killed, or still going on) may have trajectories under way; they are counted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import JournalError
from stretto.store.schema import connect_readonly, journal_path

NUM_DETAILS = 5  # offenders named for each law
LOGPROB_SLACK = 1e-3  # a log-probability computed in low precision may lie this far above 0

NAMES = {"1": "law 1  one voice", "2": "law 2  nothing lost", "3": "law 3  nothing old", "once": "       exactly once"}

# Which state may follow which; nothing follows an end. `NULL` is the admission.
LEGAL_MOVES = """(VALUES
    (NULL, 'running'),
    ('running', 'running'), ('running', 'suspended'), ('running', 'scoring'), ('running', 'failed'),
    ('running', 'dropped'), ('suspended', 'suspended'), ('suspended', 'running'), ('suspended', 'failed'),
    ('suspended', 'dropped'), ('scoring', 'scoring'), ('scoring', 'scored'), ('scoring', 'failed'),
    ('scoring', 'dropped'), ('scored', 'training'), ('scored', 'filtered'), ('scored', 'dropped'),
    ('training', 'trained'))"""


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
    finished: bool
    how: str  # in words
    params: dict[str, Any]
    breaks: dict[str, list[str]] = field(default_factory=lambda: {law: [] for law in NAMES})
    mixed: int = 0  # trajectories with tokens of other versions than their own
    num_tokens: int = 0


# -- the checks: law, query. Every row is one break, in words ----------------------------------------------------------

CHECKS: tuple[tuple[str, str], ...] = (
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' has version ' || t.version || ', its group ' || group_id ||
            ' has version ' || g.version
        FROM trajectories t JOIN groups g USING (group_id) WHERE t.version <> g.version""",
    ),
    (
        "1",
        """SELECT 'version ' || version || ' of group ' || group_id || ' was never published'
        FROM groups WHERE version NOT IN (SELECT version FROM versions)""",
    ),
    (
        "1",
        """SELECT 'trajectories ' || MIN(trajectory) || ' and ' || MAX(trajectory) || ' share the seed ' || seed
        FROM trajectories GROUP BY seed HAVING COUNT(*) > 1""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' has ' || COUNT(trajectory) || ' trajectories, not ' || :group
        FROM groups LEFT JOIN trajectories USING (group_id) GROUP BY group_id HAVING COUNT(trajectory) <> :group""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is member ' || member || ' of group ' || group_id ||
            iif(group_id IN (SELECT group_id FROM groups), ', which is not its place', ', which was never admitted')
        FROM trajectories WHERE trajectory <> group_id * :group + member OR member NOT BETWEEN 0 AND :group - 1
            OR group_id NOT IN (SELECT group_id FROM groups)""",
    ),
    (
        "2",
        """SELECT 'the prompt of group ' || (previous + 1) || ' was skipped: group ' || group_id || ' came next'
        FROM (SELECT group_id, LAG(group_id, 1, -1) OVER (ORDER BY group_id) AS previous FROM groups)
        WHERE group_id <> previous + 1""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' has prompt ' || prompt_index || ' of the stream, not its own'
        FROM groups WHERE prompt_index <> group_id""",
    ),
    # With the three below, and no group skipped, an epoch that is over has drawn every row exactly once.
    (
        "2",
        """SELECT 'groups ' || MIN(group_id) || ' and ' || MAX(group_id) || ' are both drawn from row ' || row_number ||
            ' in epoch ' || epoch
        FROM groups GROUP BY epoch, row_number HAVING COUNT(*) > 1""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' is drawn from row ' || row_number || ' of ' || :data_rows
        FROM groups WHERE row_number NOT BETWEEN 0 AND :data_rows - 1""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' is of epoch ' || epoch || ', and prompt ' || prompt_index || ' of ' ||
            :data_rows || ' rows is of epoch ' || (prompt_index / :data_rows)
        FROM groups WHERE epoch <> prompt_index / :data_rows""",
    ),
    (
        "2",
        f"""WITH legal(source, target) AS {LEGAL_MOVES},
        chain AS (SELECT seq, trajectory, from_state, to_state,
            LAG(to_state) OVER (PARTITION BY trajectory ORDER BY seq) AS previous FROM transitions)
        SELECT 'trajectory ' || trajectory || ' went from ' || COALESCE(previous, 'nothing') || ' to ' || to_state ||
            iif(from_state IS previous, '', ', recorded as from ' || COALESCE(from_state, 'nothing'))
        FROM chain LEFT JOIN legal ON legal.source IS chain.from_state AND legal.target = chain.to_state
        WHERE legal.target IS NULL OR from_state IS NOT previous""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || t.trajectory || ' is ' || t.state || ', its last transition says ' ||
            COALESCE(x.to_state, 'nothing')
        FROM trajectories t LEFT JOIN (SELECT trajectory, to_state, MAX(seq) FROM transitions GROUP BY trajectory) x
        USING (trajectory) WHERE x.to_state IS NOT t.state""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is recorded in ' || what || ' and was never admitted' FROM (
            SELECT trajectory, 'transitions' AS what FROM transitions
            UNION SELECT trajectory, 'completions' FROM completions UNION SELECT trajectory, 'a batch' FROM members
            UNION SELECT trajectory, 'failures' FROM failures)
        WHERE trajectory NOT IN (SELECT trajectory FROM trajectories)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is ' || state || ' and in no batch' FROM trajectories
        WHERE state IN ('training', 'trained')
            AND trajectory NOT IN (SELECT trajectory FROM members WHERE use = 0)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is in the batch of update ' || update_id || ' and ' || state
        FROM members JOIN trajectories USING (trajectory) JOIN updates USING (update_id)
        WHERE state <> iif(finished_at IS NULL AND use = 0, 'training', 'trained')""",
    ),
    (
        "2",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' was in a batch without its ' ||
            iif(COALESCE(num_tokens, 0) = 0, 'tokens', 'reward')
        FROM members JOIN trajectories USING (trajectory) LEFT JOIN completions USING (trajectory)
        WHERE COALESCE(num_tokens, 0) = 0 OR reward IS NULL OR typeof(reward) NOT IN ('real', 'integer')
            OR ABS(reward) > 1.7976931348623157e308""",
    ),
    (
        "2",
        """SELECT DISTINCT 'trajectory ' || m.trajectory || ' was taken into a batch before its reward was recorded'
        FROM members m JOIN transitions taken ON taken.trajectory = m.trajectory AND taken.to_state = 'training'
        WHERE NOT EXISTS (SELECT 1 FROM transitions s
            WHERE s.trajectory = m.trajectory AND s.to_state = 'scored' AND s.seq < taken.seq)""",
    ),
    (
        "2",
        """SELECT 'update ' || update_id || ' has a batch of ' || COUNT(DISTINCT group_id) || ' groups, not ' || :batch
        FROM updates LEFT JOIN (SELECT * FROM members WHERE use = 0) USING (update_id)
        LEFT JOIN trajectories USING (trajectory)
        GROUP BY update_id HAVING COUNT(DISTINCT group_id) <> :batch""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || t.trajectory || ' is ' || t.state || ', but others of its group ' || t.group_id ||
            ' are in the batch of update ' || taken.update_id
        FROM trajectories t
        JOIN (SELECT group_id, MIN(update_id) AS update_id FROM members JOIN trajectories USING (trajectory)
            WHERE use = 0 GROUP BY group_id) taken USING (group_id)
        WHERE t.state NOT IN ('failed', 'filtered', 'dropped') AND NOT EXISTS (SELECT 1 FROM members m
            WHERE m.trajectory = t.trajectory AND m.use = 0 AND m.update_id = taken.update_id)""",
    ),
    (
        "2",
        """SELECT 'update ' || (previous + 1) || ' is missing: update ' || update_id || ' came next'
        FROM (SELECT update_id, LAG(update_id, 1, -1) OVER (ORDER BY update_id) AS previous FROM updates)
        WHERE update_id <> previous + 1""",
    ),
    (
        "2",
        """SELECT 'update ' || update_id || ' was not finished, and later ones were taken' FROM updates
        WHERE finished_at IS NULL AND update_id < (SELECT MAX(update_id) FROM updates)""",
    ),
    (
        "2",
        """SELECT 'the run is finished with ' || done || ' of ' || :updates || ' updates'
        FROM (SELECT COUNT(finished_at) AS done FROM updates) WHERE :finished AND done <> :updates""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' failed ' || COUNT(*) || ' times in ' || kind ||
            ', the recipe allows ' || (:retries + 1)
        FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > :retries + 1""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is ' || state || ' after its last try in ' || kind || ' failed'
        FROM trajectories JOIN (SELECT trajectory, kind FROM failures GROUP BY trajectory, kind
            HAVING COUNT(*) > :retries) USING (trajectory)
        WHERE state IN ('scored', 'training', 'trained')""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is failed before its ' || :retries || ' retries were used'
        FROM trajectories WHERE state = 'failed' AND trajectory NOT IN (
            SELECT trajectory FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > :retries)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is filtered, and the recipe filters nothing' FROM trajectories
        WHERE state = 'filtered' AND NOT :filters""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is dropped, and the paradigm drops nothing' FROM trajectories
        WHERE state = 'dropped' AND NOT :drops""",
    ),
    (
        "2",
        """SELECT 'the run is finished, and trajectory ' || trajectory || ' is still ' || state FROM trajectories
        WHERE :finished AND NOT :drops AND state NOT IN ('trained', 'failed', 'filtered', 'dropped')""",
    ),
    (
        "3",
        """SELECT 'trajectory ' || trajectory || ' of version ' || t.version || ' is in the batch of update ' ||
            update_id || ', ' || (update_id - t.version) || ' updates later; it was admitted under ' || staleness
        FROM members JOIN trajectories t USING (trajectory) JOIN groups USING (group_id)
        WHERE update_id - t.version NOT BETWEEN 0 AND staleness""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' was trained at update ' || MAX(update_id) || ', its deadline was ' ||
            deadline
        FROM members JOIN trajectories USING (trajectory) JOIN groups USING (group_id)
        GROUP BY group_id HAVING MAX(update_id) > deadline""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' was admitted under staleness ' || staleness || ', the run allows ' ||
            :staleness
        FROM groups WHERE staleness NOT BETWEEN 0 AND :staleness""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' has deadline ' || deadline || ', not version ' || version ||
            ' + staleness ' || staleness
        FROM groups WHERE deadline <> version + staleness""",
    ),
    (
        "3",
        """SELECT DISTINCT 'group ' || group_id || ' is under way and missed its deadline, update ' || deadline
        FROM groups JOIN trajectories USING (group_id)
        WHERE NOT :drops AND state IN ('running', 'suspended', 'scoring', 'scored')
            AND deadline <= (SELECT MAX(update_id) FROM updates)""",
    ),
    (
        "once",
        """SELECT 'trajectory ' || trajectory || ' is trained ' || COUNT(*) || ' times as use ' || use ||
            ', in updates ' || MIN(update_id) || ' and ' || MAX(update_id)
        FROM members GROUP BY trajectory, use HAVING COUNT(*) > 1""",
    ),
    (
        "once",
        """SELECT 'trajectory ' || trajectory || ' has ' || COUNT(*) || ' ends' FROM transitions
        WHERE to_state IN ('trained', 'failed', 'filtered', 'dropped') GROUP BY trajectory HAVING COUNT(*) > 1""",
    ),
    (
        "once",
        """SELECT 'trajectory ' || trajectory || ' was used again and never trained' FROM members WHERE use <> 0
            AND trajectory NOT IN (SELECT trajectory FROM members WHERE use = 0)""",
    ),
)


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
            verdict = ("" if finding.holds else f"{verdict}, ") + f"broken by paradigm: {finding.by_paradigm}"
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
    names = ("paradigm", "staleness", "batch", "group", "updates", "data_rows", "retries", "filters")
    missing = [name for name in names if name not in facts]
    if missing:
        raise JournalError(f"journal `{path}` does not say what run it is of: no `{missing[0]}`")
    last = db.execute("SELECT outcome FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
    outcome = last[0] if last else None
    params = {name: facts[name] for name in names}
    params |= {"finished": outcome == "finished", "drops": facts["paradigm"] == "drop"}
    how = {"finished": "run finished", "stopped": "run stopped"}.get(outcome or "", "run interrupted or going on")
    return _Run(facts["paradigm"], outcome == "finished", how, params)


def _check_tokens(db: sqlite3.Connection, run: _Run) -> None:
    """Law 1 and the log-probabilities of law 2, inside the blobs."""
    published: dict[int, str] = dict(db.execute("SELECT version, checksum FROM versions"))
    rows = db.execute(
        "SELECT c.trajectory, t.version, c.version, c.checksum, c.num_tokens, c.tokens, c.logprobs, c.token_versions "
        "FROM completions c JOIN trajectories t USING (trajectory)"
    )
    for trajectory, version, stamp, checksum, num_tokens, tokens, logprobs, token_versions in rows:
        run.num_tokens += num_tokens
        sizes = [len(part) for part in (tokens, logprobs, token_versions) if part is not None]
        if any(size != 4 * num_tokens for size in sizes):
            run.breaks["1"].append(f"trajectory {trajectory} has {num_tokens} tokens and blobs of {sizes} bytes")
            continue
        values = np.frombuffer(logprobs, "<f4")
        if not (np.isfinite(values).all() and (values <= LOGPROB_SLACK).all()):
            run.breaks["2"].append(f"trajectory {trajectory} has log-probabilities that are none")
        drawn = [version] if token_versions is None else np.frombuffer(token_versions, "<i4").tolist()
        mixed = any(other != version for other in drawn)
        for sentence in _voice(run, version, stamp, checksum, drawn if mixed else [version], published):
            run.breaks["1"].append(f"trajectory {trajectory} {sentence}")
        run.mixed += mixed


def _voice(
    run: _Run, version: int, stamp: int, checksum: str, drawn: list[int], published: dict[int, str]
) -> Iterator[str]:
    """What is wrong with the versions of one trajectory's tokens; mixing them is no fault under `partial`."""
    mixed = drawn != [version]
    if mixed and run.paradigm != "partial":
        others = [other for other in drawn if other != version]
        yield f"of version {version} has {len(others)} tokens of other versions, the first of {others[0]}"
    elif mixed and (drawn != sorted(drawn) or drawn[0] < version or drawn[-1] not in published):
        yield f"of version {version} has tokens of versions {sorted(set(drawn))}, which do not follow one another"
    own = {version, *drawn} if mixed else {version}
    if stamp not in own:
        yield f"of version {version} was generated under version {stamp}"
    elif checksum not in {published.get(one) for one in own}:
        yield f"was generated by weights {checksum}, version {version} is {published.get(version, 'not published')}"


def _findings(db: sqlite3.Connection, run: _Run) -> list[Finding]:
    def one(query: str) -> Any:
        return db.execute(query).fetchone()

    states = dict(db.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    ends = [f"{states.pop(end, 0):,} {end}" for end in ("trained", "failed", "filtered")]
    dropped, under_way = states.pop("dropped", 0), sum(states.values())
    (versions,) = one("SELECT COUNT(*) FROM versions")
    (completions,) = one("SELECT COUNT(*) FROM completions")
    uses, again, age, oldest = one(
        "SELECT COUNT(*), COALESCE(SUM(use <> 0), 0), COALESCE(AVG(update_id - version), 0), "
        "COALESCE(MAX(update_id - version), 0) FROM members JOIN trajectories USING (trajectory)"
    )
    updates, groups = one(
        "SELECT COUNT(DISTINCT update_id), COUNT(DISTINCT group_id) FROM updates JOIN members USING (update_id) "
        "JOIN trajectories USING (trajectory) WHERE finished_at IS NOT NULL AND use = 0"
    )
    rewinds, erased = one("SELECT COUNT(*), COALESCE(SUM(num_trajectories), 0) FROM rewinds")
    lost = dropped + (under_way if run.finished else 0)
    counts = {
        "1": f"{completions:,} completions, {run.num_tokens:,} tokens, {versions:,} versions",
        "2": f"{', '.join(ends)}, {dropped:,} dropped, {under_way:,} under way ({run.how}); "
        f"{groups:,} groups in {updates:,} updates",
        "3": f"{uses:,} samples, age mean {age:.2f} max {oldest}, bound {run.params['staleness']}",
        "once": f"{uses - again:,} trained once, {again:,} later uses",
    }
    if rewinds:
        counts["2"] += f"; rewinds to a checkpoint: {rewinds}, with {erased:,} trajectories begun after it"
    excused = {"1": run.mixed if run.paradigm == "partial" else None, "2": lost if run.params["drops"] else None}
    return [
        Finding(law, len(breaks), excused.get(law), counts[law], tuple(breaks[:NUM_DETAILS]))
        for law, breaks in run.breaks.items()
    ]
