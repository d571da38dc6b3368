"""The tables of `RUN/journal.sqlite`, and how the file is opened.

    run            one row a fact of the run: paradigm, staleness, batch, group, updates, seed ... (value is JSON)
    phases         one row each time that the recipe changed, the first of them as the run began: `first_update` is the
                   first update that is trained under it, `first_group` the first group that is admitted under it;
                   `facts` are those of `run` then (JSON), and `recipe` is the resolved recipe (TOML)
    sessions       one row each time a process took the run up; `outcome` is `finished`, `stopped` or `failed`, and
                   NULL while it runs, and if it was killed; `totals` are the sums of the run when it was stopped
                   (JSON), and `error` is the first line of the error that it failed by
    versions       every version of the policy with the checksum of its weights; `published_after` and `loaded_after`
                   are the last transition recorded before it was published, and before an engine first held it
    remade         the checksum that a version had before its weights were lost and made again with other bits
    receipts       one row each time that an engine which cannot read back its weights loaded a version: the checksum of
                   the file, and by how much its log-probabilities of a probe differ from the trainer's, absolute;
                   `held` is a digest of the engine's own checksums of its weights, NULL if its release has none
    groups         one row an admitted prompt: version, deadline (`version + staleness`), the prompt itself, its place
                   in the stream of prompts (`prompt_index`), the row of the data set that it was drawn from and why
                   (`draw`); `epoch` is NULL where rows come as often as their priority has it; `spared` is the update
                   before whose batch it was kept without a signal, because the limit of filtered groups was reached;
                   `task` is the label of its task, NULL if that has none, and `task_index` its place among the groups
                   of that task; of several tasks, `lost_before` is the next group that was admitted when this one was
                   counted as lost (filtered, dropped or failed as a whole), NULL if it was not
    trajectories   one small row each, changed as it moves through its states; `turn_rewards` are those of its turns
                   where they are told apart, and add up to `reward`; `reward_parts` are the rewards of a task that has
                   several, and `reward` is their weighted sum; `lost_tokens` were sampled before it ended
                   without a completion; `num_lineages` is NULL until it has its last token; `limit_reached` is the
                   limit that its episode ran into (`turns`, `tokens`, `seconds`, `budget`), NULL if it ended by
                   itself, and `spent` what the episode spent, NULL if nothing; both are those of its last run
    completions    what a trajectory generated, one row a lineage, with the version and checksum that the engine stamped
                   on it; written once, apart from `trajectories` so that a change of state never rewrites the blobs; of
                   an episode with several turns `turns` says where each begins and ends, and what lies between was
                   observed: `num_tokens` counts it, `num_sampled` does not; `context` is what the lineage begins with,
                   NULL if that is the prompt of its group; `train` is 0 if it is never trained on; `turn_numbers` are
                   those of its turns in the episode, NULL if the trajectory has one lineage; `receipts` are the ids of
                   those that the engine stamped on it (JSON), NULL if it gives none; small columns come first, because
                   a column behind large ones is slow to read
    transitions    every change of state; `seq` is the order in which they were recorded, whatever the clocks say,
                   and is never given twice
    failures       every attempt that failed: to generate a trajectory, or to score it
    updates        one row a batch taken; `finished_at` is NULL until the trainer is done with it; `checksum` is that of
                   the weights that it made, `metrics` its line and `totals` the sums of the run at its end (JSON);
                   `samples` are the digests of what it trained on, `digest` is its own (`digests.py`), `advantages`
                   that of the advantages, which the trainer reports
    members        the lineages of each batch in order; `use` 0 is the training that law 2 speaks of, later uses are
                   those of a replay buffer. (trajectory, lineage, use) is unique: the file refuses to train one twice
    evaluations    before, during, after, skipped; `reward` is the score at the evaluation's temperature; `line` is what
                   `metrics.jsonl` says of it (JSON), with the greedy score if there is one
    held_out       the prompts of evaluations, once each: a later phase may ask others, so that one index has several;
                   `task` is the label of its task, NULL if that has none
    answers        what an evaluation's version answered, one row a lineage, with the columns of `completions`; `greedy`
                   is 1 at temperature 0; `reward` is NULL and `error` says why if it could not be scored;
                   `reward_parts` as in `trajectories`
    token_values   what the trainer computed for the sampled tokens of a member of a batch, in order: its
                   log-probability as the update began, the ratio of the objective, the advantage, and the derivative of
                   the loss by the log-probability; only with `observe.tokens`, and not for samples that are skipped
    status         one row: what the run does now, and who waits for what (JSON); changed about once a second
    instances      one row an instance that joined a session: its slots, when it came and left, and as what (`removed`,
                   `lost`; NULL while it is there, and where the session ended first)
    moves          every time that a trajectory changed its instance: its context then, the bytes of KV that it took
                   along, the tokens that are prefilled again instead, and why; `source` is NULL after a resume
    notes          what happened besides, in words. Of the kind `admission` are waits over time, looked at twice a
                   second: from then on no group could start, for the reason in the text; if it is empty, one could

States, the same words as in `core/ledger.py`: `waiting` (on no instance, or its run was stopped), `running` (on an
instance, or queued there), `scoring` (has its last token), `scored`, `training` (in the batch of an update that is not
finished), and the ends `trained`, `failed`, `filtered`, `dropped`. If a recorded reward cannot be trained on, a resumed
run takes it back: `scored` becomes `scoring`. A batch that holds it and was not trained is given back before:
`training` becomes `scored`.

Times are seconds since 1970 (`clock.py`). Blobs are little-endian. Tokens and versions are int32, log-probabilities
and values of tokens float32, rewards of turns float64. Supports are int32: how many tokens each token was drawn from,
and then those tokens; NULL if all were drawn from the whole vocabulary. Turns are int32: the beginning and end of each;
NULL if there is one turn, which is all of it. Numbers of turns are int32. Parts of a reward are JSON, a list of name,
weight and value; a value is null if that reward does not apply. Routing is the stamp of a record (`routing_files.py`):
its digest of 16 bytes, and its shape and bytes an id, int32; NULL if there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stretto.errors import JournalError, RunError, SchemaError, StrettoError, first_line

JOURNAL_NAME = "journal.sqlite"
RESTORE = "put the journal back from a copy, with its `-wal` file if it had one"
RESTORE_OR_BEGIN = f"{RESTORE}; if its run was killed as it began, `--resume` begins it"
NUM_NAMED = 5  # runs of a folder that is none itself
SCHEMA_VERSION = 12

State = Literal["waiting", "running", "scoring", "scored", "training", "trained", "failed", "filtered", "dropped"]
ENDS: tuple[State, ...] = ("trained", "failed", "filtered", "dropped")
UNDER_WAY: tuple[State, ...] = ("waiting", "running", "scoring", "scored", "training")


# The laws that each paradigm gives up, as `verify` knows them: written down apart from the table of the core.
LAWS_GIVEN_UP: Mapping[str, tuple[int, ...]] = {
    "synchronous": (),
    "one-step-off": (),
    "partial": (1,),
    "drop": (2,),
    "multi-version": (),
}

RESERVES = ("reserve_groups", "reserve_members")  # the facts by which a recipe gives up law 2

Attempt = Literal["generation", "scoring"]
Order = Literal["shuffled", "pass-rate", "mixed"]
"""Of the rows: of one task, or `mixed` if there are several, each with its own."""

Departure = Literal["removed", "lost"]

EvaluationKind = Literal["before", "during", "after", "skipped"]

SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE phases (
    phase INTEGER PRIMARY KEY, first_update INTEGER NOT NULL, first_group INTEGER NOT NULL, began_at REAL NOT NULL,
    facts TEXT NOT NULL, recipe TEXT NOT NULL);
CREATE TABLE sessions (
    session INTEGER PRIMARY KEY, started_at REAL NOT NULL, ended_at REAL, outcome TEXT, totals TEXT, error TEXT);
CREATE TABLE versions (
    version INTEGER PRIMARY KEY, checksum TEXT NOT NULL, published_at REAL NOT NULL,
    published_after INTEGER NOT NULL, loaded_at REAL, loaded_after INTEGER);
CREATE TABLE remade (version INTEGER NOT NULL, checksum TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE receipts (
    id TEXT PRIMARY KEY, instance INTEGER NOT NULL, version INTEGER NOT NULL, checksum TEXT NOT NULL,
    num_tokens INTEGER NOT NULL, mean_difference REAL NOT NULL, largest_difference REAL NOT NULL,
    tolerance REAL NOT NULL, served_by TEXT NOT NULL, at REAL NOT NULL, layout TEXT NOT NULL, held TEXT) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, epoch INTEGER, prompt_index INTEGER NOT NULL, row_number INTEGER NOT NULL,
    version INTEGER NOT NULL, deadline INTEGER NOT NULL, staleness INTEGER NOT NULL, prompt_text TEXT NOT NULL,
    prompt_tokens BLOB NOT NULL, row TEXT NOT NULL, admitted_at REAL NOT NULL, draw TEXT NOT NULL, spared INTEGER,
    task TEXT, task_index INTEGER NOT NULL, lost_before INTEGER);
CREATE TABLE trajectories (
    trajectory INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, member INTEGER NOT NULL, version INTEGER NOT NULL,
    seed INTEGER NOT NULL, state TEXT NOT NULL, instance INTEGER, reward REAL, scored_at REAL,
    ended_at REAL, error TEXT, lost_tokens INTEGER, turn_rewards BLOB, num_lineages INTEGER,
    limit_reached TEXT, spent REAL, reward_parts TEXT);
CREATE INDEX trajectories_by_group ON trajectories (group_id, member);
CREATE INDEX trajectories_by_state ON trajectories (state);
CREATE TABLE completions (
    trajectory INTEGER NOT NULL, lineage INTEGER NOT NULL, train INTEGER NOT NULL, version INTEGER NOT NULL,
    checksum TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL, finish TEXT NOT NULL,
    started_at REAL NOT NULL, finished_at REAL NOT NULL, prefilled INTEGER NOT NULL, receipts TEXT, turn_numbers BLOB,
    turns BLOB, text TEXT NOT NULL, context_text TEXT, context BLOB, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    token_versions BLOB, supports BLOB, routing BLOB, PRIMARY KEY (trajectory, lineage));
CREATE INDEX completions_in_short ON completions (
    trajectory, lineage, version, num_sampled, finish, started_at, finished_at);
CREATE TABLE transitions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, trajectory INTEGER NOT NULL, from_state TEXT, to_state TEXT NOT NULL,
    at REAL NOT NULL, reason TEXT NOT NULL);
CREATE INDEX transitions_by_trajectory ON transitions (trajectory);
CREATE TABLE failures (
    id INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL);
CREATE INDEX failures_by_trajectory ON failures (trajectory, kind);
CREATE TABLE updates (
    update_id INTEGER PRIMARY KEY, taken_at REAL NOT NULL, finished_at REAL, checksum TEXT,
    metrics TEXT NOT NULL DEFAULT '{}', totals TEXT, samples BLOB, digest TEXT, advantages TEXT);
CREATE TABLE members (
    update_id INTEGER NOT NULL, position INTEGER NOT NULL, trajectory INTEGER NOT NULL, use INTEGER NOT NULL DEFAULT 0,
    lineage INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (update_id, position)) WITHOUT ROWID;
CREATE UNIQUE INDEX members_train_once ON members (trajectory, lineage, use);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, reward REAL,
    num INTEGER NOT NULL, seconds REAL NOT NULL, line TEXT);
CREATE TABLE held_out (
    id INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, digest TEXT NOT NULL, prompt_text TEXT NOT NULL,
    prompt_tokens BLOB NOT NULL, row TEXT NOT NULL, task TEXT, UNIQUE (prompt_index, digest));
CREATE TABLE answers (
    evaluation INTEGER NOT NULL, prompt_index INTEGER NOT NULL, prompt INTEGER NOT NULL, greedy INTEGER NOT NULL,
    lineage INTEGER NOT NULL, num_lineages INTEGER NOT NULL, reward REAL, reward_parts TEXT, error TEXT,
    num_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL, finish TEXT, turn_numbers BLOB, turns BLOB,
    text TEXT NOT NULL, context_text TEXT, context BLOB, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    PRIMARY KEY (evaluation, prompt_index, greedy, lineage));
CREATE TABLE token_values (
    update_id INTEGER NOT NULL, position INTEGER NOT NULL, logprobs BLOB NOT NULL, ratios BLOB NOT NULL,
    advantages BLOB NOT NULL, gradients BLOB NOT NULL, PRIMARY KEY (update_id, position));
CREATE TABLE status (id INTEGER PRIMARY KEY CHECK (id = 0), at REAL NOT NULL, state TEXT NOT NULL);
CREATE TABLE instances (
    session INTEGER NOT NULL, instance INTEGER NOT NULL, slots INTEGER NOT NULL, joined_at REAL NOT NULL, left_at REAL,
    outcome TEXT, reason TEXT, PRIMARY KEY (session, instance)) WITHOUT ROWID;
CREATE TABLE moves (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, trajectory INTEGER NOT NULL, version INTEGER NOT NULL, source INTEGER,
    target INTEGER NOT NULL, context INTEGER NOT NULL, num_bytes INTEGER NOT NULL, prefilled INTEGER NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE notes (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL);
"""


# Update, trajectory, kind and number of the failed attempts of the members of batches, in the order of the digests.
FAILURES_OF_MEMBERS = """SELECT m.update_id, m.trajectory, f.kind, COUNT(*)
    FROM (SELECT DISTINCT update_id, trajectory FROM members WHERE update_id BETWEEN ? AND ?) m
    JOIN failures f ON f.trajectory = m.trajectory GROUP BY m.update_id, m.trajectory, f.kind
    ORDER BY m.update_id, m.trajectory, f.kind"""

# Update and columns of the lineages that are not trained, of trajectories that a batch trains for the first time.
UNTRAINED_OF_MEMBERS = """SELECT m.update_id, c.trajectory, c.lineage, t.group_id, t.version,
    COALESCE(c.context, g.prompt_tokens), c.version, c.checksum, c.finish, c.turn_numbers, c.tokens, c.logprobs,
    c.token_versions, c.supports, c.turns, c.routing
    FROM (SELECT DISTINCT update_id, trajectory FROM members WHERE use = 0 AND update_id BETWEEN ? AND ?) m
    JOIN completions c ON c.trajectory = m.trajectory JOIN trajectories t ON t.trajectory = m.trajectory
    LEFT JOIN groups g ON g.group_id = t.group_id WHERE c.train = 0 ORDER BY m.update_id, c.trajectory, c.lineage"""


# Number, first update, first group, facts and recipe of the phases that begin with some updates, for the digests.
PHASES = """SELECT phase, first_update, first_group, facts, recipe FROM phases WHERE first_update BETWEEN ? AND ?
    ORDER BY phase"""

LARGEST_ID = (1 << 63) - 1  # of a row

# The staleness that the phase of a group allows: a scalar expression over `group_id`.
STALENESS_OF_PHASE = """COALESCE((SELECT json_extract(facts, '$.staleness') FROM phases p
    WHERE p.first_group <= group_id ORDER BY phase DESC LIMIT 1), :staleness)"""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that its laws, and whatever is computed from it later, depend on."""

    paradigm: str
    staleness: int  # K; with `auto` the cap
    auto: bool
    batch: int  # B, groups per update
    group: int  # G, trajectories per group
    updates: int  # N
    seed: int
    data_rows: int  # that are drawn, which is one epoch
    retries: int  # tries after the first, to generate a trajectory and again to score it
    filter_limit: int = 0  # groups without signal that are replaced before one batch, at most; 0: none
    order: Order = "shuffled"  # of the rows
    # Label, rows, order, dropped rows and limit of prompts (as below) of each task that has a label.
    tasks: tuple[tuple[str, int, str, int, int], ...] = ()
    replay_groups: int = 0  # groups that an update uses again, at most
    replay_uses: int = 0  # of one group, after its first, at most
    templated: bool = False  # a chat template made the prompts
    vocabulary: int = 0  # every token id is below; 0: not recorded
    laws_broken: tuple[int, ...] = ()  # the laws that the paradigm gives up by design
    reserve_groups: int = 0  # groups that are started beyond those that the batches need, at most, at once
    reserve_members: int = 0  # trajectories that a group is started with beyond `group`
    dropped_rows: int = 0  # of the data set, beside `data_rows`: they are never drawn, and count in row numbers
    prompt_limit: int = 0  # tokens, beyond which prompts are dropped or cut; 0: none is
    engine: str = "native"  # `vllm`: every trajectory has a receipt


HEADER = b"SQLite format 3\0"


def journal_path(run_folder: str | Path) -> Path:
    """The journal of a run folder (or the journal itself), or a `RunError` that says what is missing."""
    path = Path(run_folder)
    if path.is_dir():
        path = path / JOURNAL_NAME
    if not path.exists() and not Path(run_folder).is_dir():
        raise RunError(f"`{run_folder}` does not exist; give the folder that `stretto train` made")
    if not path.is_file():
        if path.name == JOURNAL_NAME and (path.parent / "config.toml").is_file():
            raise RunError(f"the run in `{path.parent}` has no `{path.name}`: {RESTORE_OR_BEGIN}")
        if inside := sorted(str(journal.parent) for journal in Path(run_folder).glob(f"*/{JOURNAL_NAME}")):
            named = ", ".join(f"`{folder}`" for folder in inside[:NUM_NAMED]) + (", ..." if inside[NUM_NAMED:] else "")
            raise RunError(f"`{run_folder}` is no run folder, it holds runs; give one of them: {named}")
        raise RunError(
            f"`{run_folder}` is no run folder: it has no `journal.sqlite`; give the folder that `stretto train` made"
        )
    if path.name != JOURNAL_NAME and not _is_database(path):
        raise RunError(
            f"`{run_folder}` is no run: it is a file, and no journal; give the folder that `stretto train` made"
        )
    return path


def _is_database(path: Path) -> bool:
    """Tells if a file begins as those of SQLite do. One that cannot be read may be one."""
    try:
        with path.open("rb") as file:
            return file.read(len(HEADER)) == HEADER
    except OSError:
        return True


ADMISSION = "admission"  # the kind of notes that the timeline draws, and nobody lists


def wal_path(journal: Path) -> Path:
    """The file of commits that are not in the journal's own file yet: without it these are lost."""
    return Path(f"{journal}-wal")


def holds_commits(journal: Path) -> bool:
    """True if commits are in the `-wal` file of a journal. Readers make an empty one too."""
    try:
        return wal_path(journal).stat().st_size > 0
    except OSError:
        return False


# What a wrong value may raise where it is decoded or used.
UNDECODABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises what is wrong with a journal that is read here as a `JournalError`: its name, the cause, what to do.

    SQLite has no checksums of content, so damage may also show as values that cannot be decoded, or that nothing can
    be made of. Only what follows from the journal belongs in the block.
    """
    try:
        yield
    except sqlite3.OperationalError as error:  # a lock, a disk, a permission; or a table that is not there
        hint = f"; {RESTORE}" if str(error).startswith("no such ") else ""
        raise JournalError(f"journal `{path}` cannot be read: {error}{hint}") from error
    except (sqlite3.Error, json.JSONDecodeError, UnicodeDecodeError) as error:  # the last: of SQLite's own words
        raise JournalError(f"journal `{path}` cannot be read: {error}; {RESTORE}") from error
    except StrettoError:
        raise
    except UNDECODABLE as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        raise JournalError(
            f"journal `{path}` is damaged: it has values that make no sense ({text}); {RESTORE}"
        ) from error


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open a journal whatever is in it, also while a run writes it. Raises `JournalError` if it is empty."""
    path = path.resolve()
    with reading(path):
        if path.is_file() and path.stat().st_size == 0:  # SQLite would remove its `-wal` file, even if it only reads
            raise JournalError(f"journal `{path}` is empty (0 bytes): {RESTORE_OR_BEGIN}")
        writable, wal = os.access(path.parent, os.W_OK), wal_path(path).exists()
        # Whoever may only read leaves a new `-wal` file behind, and cannot roll back what was half written when a
        # process was killed before the journal had its first table. Whoever may write takes a `-wal` file away that
        # holds commits, which changes the journal's own file. One that holds none is that of another reader: the last
        # of them to close takes it away.
        mode = "rw" if writable and not holds_commits(path) else "ro"
        uri = f"{path.as_uri()}?mode={mode}"
        if not writable and not wal:
            uri += "&immutable=1"  # readers of a WAL file need its index beside it, which nobody can create here
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)
        connection.execute("PRAGMA query_only = ON")
        return connection


def connect_readonly(path: str | Path) -> sqlite3.Connection:
    """Open a journal to read it, also while a run writes it; what is read inside one `BEGIN` is one moment."""
    path = Path(path).resolve()
    connection = open_readonly(path)
    try:
        with reading(path):
            check_schema(connection, path)
    except JournalError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def opened_readonly(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Opens a journal to read it, and closes it. Raises whatever is wrong with it as a `JournalError`."""
    connection = connect_readonly(path)
    try:
        with reading(Path(path)):
            yield connection
    finally:
        connection.close()


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a journal of this schema."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found == 0:  # that of every file which nobody gave another
        raise JournalError(f"`{path}` is a SQLite file without the tables of a journal: {RESTORE_OR_BEGIN}")
    if found != SCHEMA_VERSION:
        raise SchemaError(
            f"journal `{path}` was written with schema version {found}, and this version of stretto reads schema "
            f"version {SCHEMA_VERSION}: use the version of stretto that wrote it, or start a new run in another folder"
        )


def check_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a journal whose pages are damaged. Reads all of the file."""
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    if path.stat().st_size % page_size:  # SQLite reads zeros instead, and does not look into the pages of an index
        raise JournalError(f"journal `{path}` is damaged: it ends within a page; {RESTORE}")
    (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if health != "ok":
        raise JournalError(f"journal `{path}` is damaged: {health.splitlines()[-1]}; {RESTORE}")
