"""Trackio, on this machine: what its database holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tracker_cases import begin, evaluation, report, rows_of, update

from stretto.observe.trackers.sample_rows import Samples

pytest.importorskip("trackio")


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The database, in a folder of the test's own."""
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio, trackio.sqlite_storage, trackio.utils):
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio")
    return trackio.sqlite_storage.SQLiteStorage


def test_a_run_and_its_continuation_are_one_run(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "rows", lambda self, number: rows_of(number, 2))
    folder = tmp_path / "my-run"
    options = begin(folder, sinks=["trackio"], samples=2, trackio={"project": "ours"})
    report(folder, options, [evaluation(0), update(0), update(1)], outcome="stopped")
    report(folder, options, [update(2), evaluation(3)])
    assert storage.get_runs("ours") == ["my-run"]
    lines = storage.get_logs("ours", "my-run")
    rewards = [(line["step"], line["update/reward_mean"]) for line in lines if "update/reward_mean" in line]
    assert rewards == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert [(line["step"], line["evaluation/score"]) for line in lines if "evaluation/score" in line] == [
        (0, 0.25),
        (3, 0.25),
    ]
    assert [line["step"] for line in lines if "samples" in line] == [0, 1, 2]


def test_a_space_that_cannot_be_reached_is_a_warning_and_the_run_goes_on(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    folder = tmp_path / "my-run"
    options = begin(folder, sinks=["trackio"], trackio={"project": "ours", "space": "somebody/space"})
    report(folder, options, [update(0), update(1)])
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("stretto")]
    assert any("`on_start` of the tracker `trackio` raised" in text for text in warnings)
    assert any("missed 2 lines" in text for text in warnings)
