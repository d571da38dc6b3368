"""`verify` runs beside the page, reports its progress, and is kept until the journal changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from view_cases import record_run

from stretto.store.verify import verify
from stretto.view.runs import RunSource
from stretto.view.verification import Verification


def finished(verification: Verification) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (state := verification.state())["state"] == "running":
        assert time.monotonic() < until, state
        time.sleep(0.02)
    return state


def test_a_verification_finds_what_verify_finds_and_is_kept(tmp_path: Path) -> None:
    record_run(tmp_path)
    verification = Verification(RunSource(tmp_path))
    assert verification.state()["state"] == "not started"
    assert verification.start()["state"] == "running"
    state = finished(verification)
    assert state["state"] == "done"
    expected = verify(tmp_path)
    assert [(each["law"], each["broken"], each["counts"]) for each in state["findings"]] == [
        (each.law, each.broken, each.counts) for each in expected
    ]
    assert verification.start() == state, "the journal has not changed, so nothing is done again"


def test_a_journal_that_has_grown_is_verified_again(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None)
    verification = Verification(RunSource(tmp_path))
    verification.start()
    assert not finished(verification)["changed"]
    recorder.journal.note("wait", "a while", at=recorder.now())
    recorder.journal.flush()
    assert verification.state()["changed"]
    assert verification.start()["state"] == "running"
    finished(verification)
    recorder.journal.close()


def test_a_journal_that_cannot_be_verified_says_why(tmp_path: Path) -> None:
    record_run(tmp_path)
    verification = Verification(RunSource(tmp_path))
    (tmp_path / "journal.sqlite").write_bytes(b"no journal")
    verification.start()
    state = finished(verification)
    assert state["state"] == "failed"
    assert "journal.sqlite" in state["error"]


def test_progress_grows_to_the_end(tmp_path: Path) -> None:
    record_run(tmp_path)
    said: list[tuple[str, float]] = []
    verify(tmp_path, lambda words, share: said.append((words, share)))
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, pytest.approx(0.7 + 0.3 * 3 / 4))
    assert "checking tokens, 0 of 24 completions" in [words for words, _ in said]
