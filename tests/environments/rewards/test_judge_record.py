"""The record of judges: costs of one judge add up, whichever process asks it."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from stretto.environments.rewards import judge_record
from stretto.environments.rewards.judge_record import Answer, JudgeRecord


def test_two_records_of_one_judge_count_together_and_one_of_another_apart(tmp_path: Path) -> None:
    first, second = (JudgeRecord(tmp_path / "judge.sqlite", "a", keeps_answers=True) for _ in range(2))
    for number in range(9):
        first.add(f"key {number}", Answer("8", 10, 2))
    second.add("another", Answer("7", 5, 1))
    assert (second.spent.calls, second.spent.input_tokens, second.spent.output_tokens) == (10, 95, 19)
    first.add("last", Answer("6"))
    again = JudgeRecord(tmp_path / "judge.sqlite", "a", keeps_answers=True)
    assert (again.spent.calls, again.spent.input_tokens) == (11, 95)
    assert JudgeRecord(tmp_path / "judge.sqlite", "b", keeps_answers=True).spent.calls == 0
    found = second.find("key 3")
    assert found is not None
    assert (found.text, found.input_tokens) == ("8", 10)


def test_a_record_waits_for_another_process_that_makes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "judge.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ending = threading.Timer(0.2, other.execute, ["COMMIT"])
    ending.start()
    assert JudgeRecord(path, "a", keeps_answers=True).spent.calls == 0
    ending.join()
    other.close()

    path = tmp_path / "locked.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(judge_record, "BUSY_S", 0.1)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        JudgeRecord(path, "a", keeps_answers=True)
    other.close()
