"""How far a run had come, as its journal says; and records of decisions that are completed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.resume_point import progress_of


def test_what_was_decided_and_recorded_in_part_is_carried_out(recorder: Any, tmp_path: Path) -> None:
    run = recorder()
    run.publish(0)
    for group in (0, 1, 2):
        run.admit(group)
    run.finish(0)
    run.journal.filtered(0, "no signal", at=5.0)  # of three
    for _ in range(2):  # one more than the recipe's retries
        run.journal.attempt_failed(3, "generation", "told to fail", at=5.0)
    run.generate(4)
    for _ in range(2):
        run.journal.attempt_failed(4, "scoring", "no idea", at=5.0)
    run.journal.attempt_failed(5, "generation", "once", at=5.0)
    for _ in range(2):
        run.journal.settle(1, drops=False, at=6.0)  # a second time changes nothing
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        states = [reader.trajectory(id).state for id in range(9)]
        assert states == ["filtered"] * 3 + ["failed", "failed", "running"] + ["running"] * 3
        assert [reader.trajectory(id).error for id in (2, 3, 4)] == ["no signal", "told to fail", "no idea"]


def test_a_run_that_has_not_begun_has_no_progress_of(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal.sqlite").close()
    assert progress_of(tmp_path / "journal.sqlite") is None


def test_a_machine_whose_clock_is_behind_takes_up_the_last_sums_and_lines_all_the_same(
    recorder: Any, tmp_path: Path
) -> None:
    run = recorder()
    run.publish(0)

    def update(number: int, at: float) -> None:
        for group in (2 * number, 2 * number + 1):
            run.admit(group)
            run.finish(group)
        run.take(number)
        line, totals = {"kind": "update", "update": number, "at": at}, {"steps": number + 1, "wall_s": 10.0 * number}
        run.journal.update_done(number, line, at=at, checksum=f"sum{number + 1}", totals=totals)
        run.publish(number + 1)

    update(0, at=100.0)
    run.journal.evaluation(1, "during", 101.0, line={"kind": "evaluation", "at": 101.0})
    run.journal.finished(stopped=True, at=102.0, totals={"steps": 1, "wall_s": 7.0})
    for session in (2, 3):
        run.journal.begin(run.facts, at=50.0)
        if session == 2:
            run.journal.finished(stopped=True, at=51.0, totals={"steps": 1, "wall_s": 8.0})
    run.journal.flush()
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert progress.totals["wall_s"] == 8.0, "the last stop after the last update"
    update(1, at=60.0)
    run.journal.flush()
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert (progress.totals["steps"], progress.totals["wall_s"]) == (2, 10.0)
    assert [line["update"] for line in progress.lines if line["kind"] == "update"] == [0, 1]
    assert sum(line["kind"] == "evaluation" for line in progress.lines) == 1
