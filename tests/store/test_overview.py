"""The overview of a run, from whatever state its folder is in."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from journal_cases import Recorder

from stretto.store.journal import Journal
from stretto.store.lock import Lock
from stretto.store.overview import is_run, overview
from stretto.store.schema import JOURNAL_NAME


def test_a_run_is_running_until_it_is_stopped_or_killed_and_can_be_taken_up_again(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    made = recorder()
    made.publish(0)
    made.update(0)
    made.journal.flush()
    alive = overview(tmp_path)
    assert (alive.state, alive.updates, alive.planned, alive.paradigm) == ("running", 1, 4, "multi-version")
    assert (alive.started_at, alive.sessions) == (1.0, 1)
    assert alive.num_bytes > 0
    made.journal.close()
    assert overview(tmp_path).state == "killed", "no end of its session is recorded"
    again = recorder(resume=True)
    again.journal.finished(stopped=True, at=9.0, totals={"tokens": 300, "wall_s": 2.0, "ages": {"0": 1, "2": 3}})
    again.journal.close()
    stopped = overview(tmp_path)
    assert (stopped.state, stopped.sessions) == ("stopped", 2)
    assert (stopped.tokens_per_second, stopped.age) == (150.0, 1.5)


def test_a_run_that_an_error_ends_has_failed_with_it_and_an_end_is_not_replaced_by_an_error(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    made = recorder()
    made.journal.ended_by("no space left", at=3.0)
    made.journal.close()
    failed = overview(tmp_path)
    assert (failed.state, failed.problem) == ("failed", "no space left")
    again = recorder(resume=True)
    assert (overview(tmp_path).state, overview(tmp_path).problem) == ("running", None)
    again.journal.finished(stopped=True, at=9.0)
    again.journal.ended_by("too late", at=9.5)
    again.journal.close()
    assert (overview(tmp_path).state, overview(tmp_path).problem) == ("stopped", None)
    with Journal.open(tmp_path / JOURNAL_NAME, resume=True) as refused:
        refused.ended_by("its session never began", at=10.0)
    assert (overview(tmp_path).state, overview(tmp_path).problem) == ("stopped", None)


def test_a_finished_run_is_finished(finished_run: Path) -> None:
    found = overview(finished_run)
    assert (found.state, found.updates, found.problem) == ("finished", 4, None)


def test_a_run_that_has_no_journal_yet_is_starting_and_one_that_lost_it_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert not is_run(tmp_path), "any project may have such a file"
    lock = Lock(tmp_path / JOURNAL_NAME)
    assert is_run(tmp_path)
    assert overview(tmp_path).state == "starting"
    lock.close()
    assert (overview(tmp_path).state, overview(tmp_path).problem) == ("damaged", "its journal is missing")


def test_a_journal_that_cannot_be_read_is_named_and_nothing_is_raised(finished_run: Path) -> None:
    journal = finished_run / JOURNAL_NAME
    whole = journal.read_bytes()
    for content, words in (
        (b"", "is empty"),
        (b"something else" * 100, "file is not a database"),
        (whole[: len(whole) // 2], ""),
        (whole[:4_096], ""),
    ):
        journal.write_bytes(content)
        found = overview(finished_run)
        assert found.state == "damaged" or (found.problem is None and not words)
        assert words in (found.problem or "")
    journal.unlink()
    with sqlite3.connect(journal) as db:
        db.execute("CREATE TABLE something (value)")
    assert "without the tables of a journal" in str(overview(finished_run).problem)
    journal.write_bytes(whole)
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE run SET value = '\"many\"' WHERE key = 'updates'")
    assert "values that make no sense" in str(overview(finished_run).problem)
    with sqlite3.connect(journal) as db:
        db.execute("PRAGMA user_version = 3")
    assert "schema version 3" in str(overview(finished_run).problem)
