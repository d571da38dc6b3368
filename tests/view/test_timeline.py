"""The timeline aggregates what ran to what a page can draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_cases import record_run

from stretto.errors import RunError
from stretto.view.runs import RunSource
from stretto.view.timeline import Window, occupancy, starts_and_ends, timeline

TIMES = st.floats(-3.0, 13.0, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 2), TIMES, TIMES), min_size=1, max_size=12), st.integers(1, 9))
def test_occupancy_is_the_mean_number_of_intervals_over_each_bin(
    spans: list[tuple[int, float, float]], bins: int
) -> None:
    rows = np.array([row for row, _, _ in spans])
    starts = np.array([min(a, b) for _, a, b in spans])
    ends = np.array([max(a, b) for _, a, b in spans])
    found = occupancy(rows, 3, starts, ends, 0.0, 10.0, bins)
    width = 10.0 / bins
    for row in range(3):
        for bin in range(bins):
            low, high = bin * width, (bin + 1) * width
            mine = rows == row
            covered = np.clip(np.minimum(ends[mine], high) - np.maximum(starts[mine], low), 0.0, None).sum() / width
            assert found[row, bin] == pytest.approx(covered, abs=1e-9)


def window(run: RunSource, **changes: object) -> Window:
    options: dict = {"start": 0.0, "end": 100.0, "bins": 50, "version_rows": 10, "instance_rows": 10}
    return Window(**options | changes)


def test_a_window_has_a_row_for_each_version_and_instance(tmp_path: Path) -> None:
    record_run(tmp_path)
    run = RunSource(tmp_path)
    found = timeline(run, window(run), now=100.0)
    assert [row["from"] for row in found["versions"]["rows"]] == [0, 1, 2, 3]
    assert [(row["from"], row["count"]) for row in found["instances"]["rows"]] == [(0, 24)]
    assert len(found["bars"]) == 24
    assert found["read"] == found["all"] == 24


def test_lanes_share_rows_if_there_are_more_than_fit(tmp_path: Path) -> None:
    record_run(tmp_path)
    run = RunSource(tmp_path)
    rows = timeline(run, window(run, version_rows=2), now=100.0)["versions"]["rows"]
    assert [(row["from"], row["to"]) for row in rows] == [(0, 1), (2, 3)]
    assert sum(row["count"] for row in rows) == 24
    rows = timeline(run, window(run, version_rows=2, versions=(1, 2)), now=100.0)["versions"]["rows"]
    assert [(row["from"], row["to"]) for row in rows] == [(1, 1), (2, 2)]


def test_a_trajectory_without_a_completion_runs_until_now(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None, updates=1)
    run = RunSource(tmp_path)
    found = timeline(run, window(run, start=recorder.at - 1, end=recorder.at + 10), now=recorder.at + 5)
    running = [bar for bar in found["bars"] if bar[4] == recorder.at + 5]
    assert [bar[0] for bar in running] == [6, 7, 8]
    recorder.journal.close()


def test_a_window_that_makes_no_sense_is_refused() -> None:
    for changes, words in (({"end": 0.0}, "no length"), ({"bins": 0}, "`bins` is 0"), ({"version_rows": 0}, "rows")):
        with pytest.raises(RunError, match=words):
            window(None, **changes)  # type: ignore[arg-type]


def test_times_without_admission_have_the_reason_that_was_recorded(tmp_path: Path) -> None:
    recorder = record_run(tmp_path, end=None)
    now = recorder.now()
    for at, reason in ((1.0, "all rows are taken"), (2.0, ""), (3.0, "a version is published first")):
        recorder.journal.note("admission", reason, at=at)
    recorder.journal.flush()
    run = RunSource(tmp_path)
    whole = Window(0.0, now + 1.0, 10, 10, 10)
    assert timeline(run, whole, now)["closed"] == [
        (1.0, 2.0, "all rows are taken"), (3.0, now, "a version is published first")
    ]  # fmt: skip
    assert timeline(run, Window(2.1, 2.9, 10, 10, 10), now)["closed"] == []
    assert run.state()["notes"] == [], "nobody lists them"
    assert run.notes() == []
    recorder.journal.close()
    record_run(tmp_path / "older")
    assert timeline(RunSource(tmp_path / "older"), whole, now)["closed"] is None


def test_starts_and_ends_count_the_trajectories_of_any_part(tmp_path: Path) -> None:
    recorder = record_run(tmp_path)
    run, end = RunSource(tmp_path), recorder.now() + 1.0
    whole = Window(-1.0, end, 50, 10, 10)
    edges = starts_and_ends(run, whole, end)
    assert sum(edges["starts"]) == sum(edges["ends"]) == timeline(run, whole, end)["count"] == 24
    width = (end + 1.0) / 50
    for first, last in ((0, 20), (10, 30), (33, 50)):
        part = Window(-1.0 + first * width, -1.0 + last * width, 10, 10, 10)
        assert sum(edges["starts"][:last]) - sum(edges["ends"][:first]) == timeline(run, part, end)["count"]
