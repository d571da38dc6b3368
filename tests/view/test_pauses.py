"""The time between two sessions of a run is no time of training, and takes little room in the timeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from view_cases import PAUSE_S, ViewRecorder, record_extended_run, record_run

from stretto.store.journal import Journal
from stretto.view.pauses import Pause, squeezed
from stretto.view.runs import RunSource
from stretto.view.timeline import Window, timeline


def test_the_figures_of_an_extended_run_are_those_of_its_summary(tmp_path: Path) -> None:
    record_extended_run(tmp_path)
    run = RunSource(tmp_path)
    assert run.state()["totals"] == {
        "tokens": 120, "wall_seconds": 40.0, "tokens_per_second": 3.0, "trainer_idle_share": 0.75,
    }  # fmt: skip
    assert run.curves()["updates"]["elapsed_seconds"] == [2.0, 4.0, 6.0, 8.0], "sums of `cycle_seconds`"


def test_a_pause_lasts_from_the_end_of_a_session_to_the_next(tmp_path: Path) -> None:
    stopped_at = record_extended_run(tmp_path)
    (pause,) = RunSource(tmp_path).pauses()
    assert (pause.start, pause.end) == (stopped_at, stopped_at + PAUSE_S)
    assert pause.shown_s == pytest.approx(0.03 * (stopped_at - 1.0))


def test_a_session_that_was_killed_lasted_until_its_last_sign(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=1)
    last = recorder.at
    recorder.journal.close()
    again = ViewRecorder(tmp_path, recorder.facts, resume=True, at=last + 500.0)
    again.journal.settle(again.facts.retries, drops=False, at=again.now())
    again.journal.close()
    (pause,) = RunSource(tmp_path).pauses()
    assert (pause.start, pause.end) == (last, last + 500.0)


def test_the_clock_without_pauses_keeps_the_order_and_the_length_of_the_rest() -> None:
    pauses = (Pause(10.0, 110.0, 2.0), Pause(120.0, 121.0, 1.0), Pause(130.0, 330.0, 2.0))
    times = np.array([0.0, 10.0, 60.0, 110.0, 120.0, 121.0, 130.0, 330.0, 340.0])
    assert squeezed(times, pauses).tolist() == pytest.approx([0.0, 10.0, 11.0, 12.0, 22.0, 23.0, 32.0, 34.0, 44.0])
    assert squeezed(times, ()).tolist() == times.tolist()


def test_nothing_runs_in_a_pause_and_the_bins_show_the_sessions(tmp_path: Path) -> None:
    stopped_at = record_extended_run(tmp_path)
    run = RunSource(tmp_path)
    end = run.state()["last_update_at"]
    window = Window(1.0, end, bins=400, version_rows=10, instance_rows=10)
    (row,) = timeline(run, window, end)["instances"]["rows"]
    values = np.zeros(400)
    values[row["first"] : row["first"] + len(row["values"])] = row["values"]
    bounds = squeezed(np.array([1.0, stopped_at, stopped_at + PAUSE_S, end]), run.pauses())
    begin, paused, again, whole = ((bounds - bounds[0]) * 400 / (bounds[-1] - bounds[0])).tolist()
    assert begin == 0.0
    assert whole == 400.0
    assert 0 < again - paused < 12, "the pause is 98 % of the time, and a narrow break"
    assert not values[int(paused) : int(again)].any()
    assert (values[: int(paused)] > 0).mean() > 0.15
    assert (values[int(again) + 1 :] > 0).mean() > 0.15


def test_what_an_earlier_session_recorded_last_is_no_status_of_the_next(tmp_path: Path) -> None:
    record_extended_run(tmp_path)
    assert RunSource(tmp_path).state()["status"] is None, "the second session recorded none"
    record_run(tmp_path / "other")
    other = RunSource(tmp_path / "other")
    assert other.state()["status"] is not None
    held = Journal.open(tmp_path / "other" / "journal.sqlite", resume=True)
    state = other.state()
    assert (state["condition"], state["status"]) == ("running", None), "a process holds it, and has not begun"
    held.close()
