"""A run is what its folder says: running, stopped, killed or finished; and reading it changes nothing."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from view_cases import record_run

from stretto.cli import main
from stretto.errors import JournalError, RunError
from stretto.store.journal import Journal
from stretto.view.columns import STATES
from stretto.view.runs import RunSource, open_runs, refuse_unreadable


def test_a_run_is_running_while_a_process_holds_it_and_killed_after_that(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None)
    run = RunSource(tmp_path)
    state = run.state()
    assert state["condition"] == "running"
    assert state["status"]["waits"] == ["trainer: update 4: group 9"]
    assert state["counts"] == {"running": 3, "trained": 24}
    recorder.journal.close()
    assert run.state()["condition"] == "killed"


@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_run_that_ended_says_how(tmp_path: Path, end: str) -> None:
    record_run(tmp_path, end=end)
    assert RunSource(tmp_path).state()["condition"] == end


def test_a_journal_whose_writer_died_is_read_with_its_wal_file(tmp_path: Path) -> None:
    recorder = record_run(tmp_path / "run", end=None)
    (tmp_path / "copy").mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal", "config.toml"):  # as `kill -9` leaves them
        shutil.copy(tmp_path / "run" / name, tmp_path / "copy" / name)
    recorder.journal.close()
    assert (tmp_path / "copy" / "journal.sqlite-wal").stat().st_size > 0
    run = RunSource(tmp_path / "copy")
    assert (run.state()["condition"], run.state()["updates_done"]) == ("killed", 4)
    assert len(run.curves()["updates"]["update"]) == 4


def test_reading_changes_nothing(tmp_path: Path) -> None:
    record_run(tmp_path)
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    run = RunSource(tmp_path)
    run.state()
    run.curves()
    with run.columns() as (columns, _):
        assert columns.num_all == 24
    with run.reading() as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM run")
    after = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before


def test_what_is_new_is_seen_and_counted(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=2)
    run = RunSource(tmp_path)
    before = run.fingerprint()
    assert run.curves()["updates"]["update"] == [0, 1]
    recorder.update(3)
    recorder.journal.flush()
    assert run.fingerprint() != before
    assert run.curves(after=1)["updates"]["update"] == [3]
    assert run.state()["counts"]["trained"] == 18
    with run.columns() as (columns, _):
        assert (columns["state"] == STATES.index("trained")).sum() == 18
    assert run.state()["counts"]["trained"] == 18
    recorder.journal.close()


def test_a_poll_says_nothing_if_nothing_has_changed(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=2)
    run = RunSource(tmp_path)
    first = run.poll(-1, "")
    assert first["curves"]["updates"]["update"] == [0, 1]
    assert run.poll(1, first["seen"]) == {"seen": first["seen"], "state": None, "curves": None}
    recorder.journal.note("wait", "a while", at=recorder.now())
    recorder.journal.flush()
    second = run.poll(1, first["seen"])
    assert second["curves"]["updates"]["update"] == []
    recorder.journal.close()
    third = run.poll(1, second["seen"])
    assert third["state"]["condition"] == "killed", "its process is gone, which no file shows"
    assert run.poll(1, third["seen"])["state"] is None


def test_a_run_without_an_update_is_empty_and_no_error(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal.sqlite").close()
    run = RunSource(tmp_path)
    state = run.state()
    assert (state["updates_done"], state["counts"], state["facts"]) == (0, {}, {})
    assert run.curves()["updates"]["update"] == []
    with run.columns() as (columns, progress):
        assert (columns.num_all, progress.is_whole) == (0, True)


def test_a_folder_that_is_no_run_and_a_journal_of_another_schema_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        open_runs([tmp_path])
    record_run(tmp_path / "old")
    with sqlite3.connect(tmp_path / "old" / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalError, match="was written with schema version 9"):
        refuse_unreadable(open_runs([tmp_path / "old"]))
    record_run(tmp_path / "new")
    refuse_unreadable(open_runs([tmp_path / "old", tmp_path / "new"]))  # the page shows what is wrong with the first


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record_run(tmp_path / name / "run")
    names = [run.name for run in open_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_the_command_refuses_bad_input_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path / "run")
    (tmp_path / "words.txt").write_text("some words")
    for arguments, words in (
        (["view", str(tmp_path)], "it holds runs; give one of them"),
        (["view", str(tmp_path / "nothing")], "nothing` does not exist"),
        (["view", str(tmp_path / "words.txt")], "is no run: it is a file, and no journal"),
        (["view", str(tmp_path / "run"), "--port", "70000"], "`--port 70000` is no port"),
        (["view", str(tmp_path / "run"), "--tokenizer", str(tmp_path)], "has no `tokenizer.json`"),
        (["report", str(tmp_path / "nothing")], "nothing` does not exist"),
        (["trace", str(tmp_path / "run"), "-o", str(tmp_path / "no" / "file")], "cannot be written"),
        (["trace", str(tmp_path / "run"), "--trajectories", "-1"], "`--trajectories -1`"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_readers_at_once_leave_no_files_behind_and_change_no_fingerprint(tmp_path: Path) -> None:
    record_run(tmp_path)
    files, run = sorted(each.name for each in tmp_path.iterdir()), RunSource(tmp_path)
    before = run.fingerprint()

    def read() -> str:
        for _ in range(20):
            RunSource(tmp_path).state()
        return RunSource(tmp_path).fingerprint()

    with ThreadPoolExecutor(4) as pool:
        seen = {future.result() for future in [pool.submit(read) for _ in range(4)]}
    assert seen == {before}
    assert sorted(each.name for each in tmp_path.iterdir()) == files


def test_files_that_a_reader_left_are_taken_away_by_the_next(tmp_path: Path) -> None:
    record_run(tmp_path)
    files, run = sorted(each.name for each in tmp_path.iterdir()), RunSource(tmp_path)
    before = run.fingerprint()
    left = sqlite3.connect(f"{(tmp_path / 'journal.sqlite').as_uri()}?mode=ro", uri=True)
    left.execute("SELECT COUNT(*) FROM run").fetchone()
    left.close()
    assert (tmp_path / "journal.sqlite-wal").stat().st_size == 0, "as a reader that may not write leaves it"
    assert run.fingerprint() == before
    run.state()
    assert sorted(each.name for each in tmp_path.iterdir()) == files
