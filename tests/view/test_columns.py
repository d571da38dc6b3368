"""The arrays of trajectories are what the journal has, whatever part of it was read first."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from view_cases import record_run

from stretto.store.schema import opened_readonly
from stretto.view import columns as module
from stretto.view.columns import STATES, Columns


def assert_same(columns: Columns, db: sqlite3.Connection) -> None:
    rows = db.execute(
        "SELECT t.trajectory, t.group_id, t.version, t.state, t.reward, COALESCE(SUM(c.num_sampled), 0), "
        "MIN(c.started_at), MAX(c.finished_at), (SELECT update_id FROM members m WHERE m.trajectory = t.trajectory) "
        "FROM trajectories t LEFT JOIN completions c USING (trajectory) GROUP BY 1"
    ).fetchall()
    assert len(rows) == columns["exists"].sum() == columns.num_all
    for id, group, version, state, reward, length, started, finished, update in rows:
        assert columns["group"][id] == group
        assert columns["version"][id] == version
        assert STATES[columns["state"][id]] == state
        assert columns["length"][id] == length
        assert columns["update"][id] == (-1 if update is None else update)
        assert np.isnan(columns["reward"][id]) if reward is None else columns["reward"][id] == reward
        if finished is not None:
            assert (columns["started"][id], columns["finished"][id]) == (started, finished)
        else:
            assert not np.isnan(columns["started"][id]), "that of the admission"
            assert np.isnan(columns["finished"][id])


@pytest.mark.parametrize("chunk", [1, 4, 7, 8192])
def test_all_parts_together_are_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    run = record_run(tmp_path, end=None)
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        columns = Columns()
        for _ in range(100):
            columns.refresh(db, deadline_s=0.0)
            if columns.progress.is_whole:
                break
        assert_same(columns, db)
    run.journal.close()


def test_the_newest_are_read_first_and_the_wanted_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    record_run(tmp_path)
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        columns = Columns()
        columns.refresh(db, deadline_s=0.0)
        assert np.flatnonzero(columns["exists"]).tolist() == [20, 21, 22, 23]
        columns.refresh(db, deadline_s=0.0, wanted=(3, 5))
        assert np.flatnonzero(columns["exists"]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23]
        assert (columns.progress.num_read, columns.progress.num_all) == (12, 24)


def test_what_was_under_way_is_read_again(tmp_path: Path) -> None:
    run = record_run(tmp_path, end=None, updates=2)
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        columns = Columns()
        columns.refresh(db, deadline_s=1.0)
        assert STATES[columns["state"][12]] == "running"
        run.finish(4)
        run.admit(5)
        run.journal.flush()
        columns.refresh(db, deadline_s=1.0)
        assert STATES[columns["state"][12]] == "scored"
        assert_same(columns, db)
    run.journal.close()
