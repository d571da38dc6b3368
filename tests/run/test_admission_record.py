"""Waits of admission are recorded when their reason becomes another one."""

from __future__ import annotations

from pathlib import Path

from stretto.core.waits import Wait
from stretto.run.admission_record import AdmissionRecord
from stretto.store.journal import Journal
from stretto.store.schema import ADMISSION, opened_readonly


def test_a_reason_is_recorded_once_while_only_its_numbers_change(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    record = AdmissionRecord(journal)
    for reason in ("12 groups have started", "13 groups have started", None, None, "12 groups have started"):
        record.note([Wait("trainer", "other")] + ([Wait("admission", reason)] if reason else []))
    journal.close()
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        rows = db.execute("SELECT kind, text FROM notes ORDER BY id").fetchall()
    assert rows == [(ADMISSION, text) for text in ("12 groups have started", "", "12 groups have started")]
