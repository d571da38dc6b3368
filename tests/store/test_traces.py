"""How far a journal has come, and how far the files beside it prove that it had come."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_cases import plan

from stretto.errors import JournalError, RunError
from stretto.run.recovery import snapshot
from stretto.store.journal import JOURNAL_NAME, Journal, JournalReader
from stretto.store.resume_point import progress_of
from stretto.store.traces import recorded_in, refuse_damaged
from stretto.store.verify import verify


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nothing(folder: Path) -> None:
    pass


def empty(folder: Path) -> None:
    (folder / JOURNAL_NAME).touch()


def only_a_header(folder: Path) -> None:
    db = sqlite3.connect(folder / JOURNAL_NAME)
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


def to_be_rolled_back(folder: Path) -> None:
    """A file that was killed in its first transaction: half written, with what undoes it beside it."""
    made = folder / "made"
    db = sqlite3.connect(made, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN")
    db.execute("CREATE TABLE run (key, value)")
    db.executemany("INSERT INTO run VALUES (?, ?)", [("x" * 1000, "y" * 1000)] * 50)
    shutil.copy(made, folder / JOURNAL_NAME)
    shutil.copy(f"{made}-journal", folder / f"{JOURNAL_NAME}-journal")
    db.execute("ROLLBACK")
    db.close()
    made.unlink()


def only_tables(folder: Path) -> None:
    Journal.open(folder / JOURNAL_NAME).close()


UNBEGUN: list[Callable[[Path], None]] = [nothing, empty, only_a_header, to_be_rolled_back, only_tables]


@pytest.mark.parametrize("left", UNBEGUN, ids=lambda make: make.__name__)
def test_a_run_that_was_killed_as_it_began_has_lost_nothing(tmp_path: Path, left: Callable[[Path], None]) -> None:
    for name in ("config.toml", "reward.log", f"{JOURNAL_NAME}.lock"):
        (tmp_path / name).touch()
    (tmp_path / "pool").mkdir()
    left(tmp_path)
    found = recorded_in(tmp_path)
    assert (found.begun, found.complete, found.lost) == (False, False, None)


def make(folder: Path, name: str) -> None:
    path = folder / name
    if path.suffix:
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"kind": "evaluation", "version": 0}\n' if path.suffix == ".jsonl" else "")
    else:
        path.mkdir(parents=True)


@pytest.mark.parametrize("left", UNBEGUN, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "trace", ["metrics.jsonl", "versions/.000000.partial", "checkpoints", "policy", "summary.json"]
)
def test_a_run_that_had_begun_has_lost_its_journal(tmp_path: Path, left: Callable[[Path], None], trace: str) -> None:
    left(tmp_path)
    make(tmp_path, trace)
    lost = recorded_in(tmp_path).lost
    assert lost is not None
    assert lost.startswith(f"`{tmp_path / JOURNAL_NAME}` ")
    assert f"`{tmp_path / Path(trace).parts[0]}` exists, so the run had started" in lost


@pytest.mark.parametrize("left", [nothing, empty], ids=lambda make: make.__name__)
def test_a_wal_file_without_its_journal_is_told_and_kept(
    recorder: Any, tmp_path: Path, left: Callable[[Path], None]
) -> None:
    run = recorder()
    run.journal.flush()
    wal = (tmp_path / f"{JOURNAL_NAME}-wal").read_bytes()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / f"{JOURNAL_NAME}-wal").write_bytes(wal)
    left(folder)
    before = files(folder)
    lost = recorded_in(folder).lost
    assert lost is not None
    assert "journal.sqlite-wal`, which is a part of it, is not empty" in lost
    for read in (verify, JournalReader):
        with pytest.raises((JournalError, RunError)):
            read(folder)
    assert files(folder) == before, "SQLite removes it beside an empty journal"


@pytest.mark.parametrize(
    ("trace", "line", "words"),
    [
        ("checkpoints/000003", "", "`{}` was written after update 2"),
        ("versions/000004.safetensors", "", "`{}` was made by update 3"),
        ("metrics.jsonl", '{"kind": "update", "update": 3}\n{"kind": "upd', "`{}` has a line of update 3"),
    ],
)
def test_a_journal_with_less_than_the_run_had_is_told(
    recorder: Any, tmp_path: Path, trace: str, line: str, words: str
) -> None:
    run = recorder()
    run.publish(0)
    for update in (0, 1):
        run.update(update)
    for group in (4, 5):
        run.admit(group)
        run.finish(group)
    run.take(2)
    run.journal.close()
    found = recorded_in(tmp_path)
    assert (found.taken, found.finished, found.complete) == (3, 2, False)
    make(tmp_path, "checkpoints/000002")
    make(tmp_path, "checkpoints/.000003.partial")
    make(tmp_path, "versions/000003.safetensors")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "update", "update": 2}\n{"kind": "evaluation", "version": 3}\n')
    assert recorded_in(tmp_path).lost is None, "update 2 was trained, and its end not recorded yet"
    if line:
        (tmp_path / trace).write_text(line)
    else:
        make(tmp_path, trace)
    lost = recorded_in(tmp_path).lost
    journal = f"`{tmp_path / JOURNAL_NAME}`"
    assert lost == f"{journal} has 2 finished updates, but {words.format(tmp_path / trace)}"


def test_looking_changes_nothing(recorder: Any, tmp_path: Path) -> None:
    run = recorder()
    run.publish(0)
    run.journal.flush()
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in (JOURNAL_NAME, f"{JOURNAL_NAME}-wal"):
        shutil.copy(tmp_path / name, killed / name)
    run.journal.close()
    for folder, index in ((killed, {f"{JOURNAL_NAME}-shm"}), (tmp_path, set())):
        before = files(folder)
        assert recorded_in(folder).begun
        refuse_damaged(folder)
        verify(folder)
        after = files(folder)
        assert {name: after[name] for name in after if Path(name).name not in index} == before


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.01])
def test_a_truncated_journal_is_refused_by_name(finished_run: Path, keep: float) -> None:
    refuse_damaged(finished_run)
    path = finished_run / JOURNAL_NAME
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) - 100])
    with pytest.raises(JournalError, match=r"journal\.sqlite` (is damaged|cannot be read).*put the journal back"):
        refuse_damaged(finished_run)
    with pytest.raises(JournalError, match=r"journal\.sqlite` (is damaged|cannot be read).*put the journal back"):
        verify(finished_run)


def test_a_file_of_another_program_is_no_journal(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as db:
        db.execute("CREATE TABLE bookmarks (address TEXT)")
    db.close()
    for read in (recorded_in, verify, JournalReader):
        with pytest.raises(JournalError, match="is a SQLite file without the tables of a journal: put the"):
            read(tmp_path)


def read_all(folder: Path) -> None:
    """Read what `show` and a resumed run read first."""
    with JournalReader(folder) as reader:
        reader.facts()
        reader.updates()
        reader.outstanding()
        reader.batch(0)
    progress_of(folder / JOURNAL_NAME)
    snapshot(folder / JOURNAL_NAME, plan(staleness=2))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET value = '{7' WHERE key = 'seed'",
        "UPDATE run SET value = '\"multi-~ersion\"' WHERE key = 'paradigm'",
        "UPDATE updates SET metrics = '{' WHERE update_id = 0",
        "UPDATE groups SET row = 'answer' WHERE group_id = 2",
        "UPDATE trajectories SET state = 'score)' WHERE trajectory = 6",
        "DROP TABLE trajectories",
        "UPDATE run SET value = 'null' WHERE key = 'batch'",
        "UPDATE updates SET metrics = '[]' WHERE update_id = 0",
        "UPDATE groups SET version = 'abc' WHERE group_id = 2",
        "UPDATE groups SET prompt_tokens = x'010203' WHERE group_id = 0",
        "UPDATE trajectories SET reward = NULL WHERE trajectory = 0",
        "UPDATE trajectories SET reward = 'one' WHERE trajectory = 0",
        "UPDATE trajectories SET turn_rewards = x'00' WHERE trajectory = 0",
        "UPDATE completions SET tokens = x'010203' WHERE trajectory = 0",
        "UPDATE completions SET logprobs = x'00000000' WHERE trajectory = 0",
        "UPDATE completions SET supports = x'00000000' WHERE trajectory = 0",
        "UPDATE completions SET turns = x'0900000003000000' WHERE trajectory = 0",
        "DELETE FROM completions WHERE trajectory = 0",
        "DELETE FROM members",
        "DELETE FROM versions WHERE version = 0",
    ],
)
def test_damaged_content_is_an_error_by_name(recorder: Any, tmp_path: Path, statement: str) -> None:
    run = recorder()
    run.publish(0)
    run.update(0)
    run.admit(2)
    run.journal.close()

    def change(statement: str) -> None:
        with sqlite3.connect(tmp_path / JOURNAL_NAME) as db:
            assert db.execute(statement).rowcount != 0
        db.close()

    change("""UPDATE updates SET metrics = '{"at": 1.0}'""")
    read_all(tmp_path)
    change(statement)
    with pytest.raises(JournalError, match="put the journal back from a copy"):
        read_all(tmp_path)
