"""MLflow, with a database of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tracker_cases import begin, evaluation, report, rows_of, update

from stretto.observe.trackers.sample_rows import Samples

mlflow = pytest.importorskip("mlflow")


def test_a_run_and_its_continuation_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "rows", lambda self, number: rows_of(number, 2))
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / "my-run"
    options = begin(folder, sinks=["mlflow"], samples=2, mlflow={"uri": uri, "experiment": "ours"})
    client = mlflow.MlflowClient(tracking_uri=uri)
    report(folder, options, [evaluation(0), update(0), update(1)], outcome="stopped")
    run_id = json.loads((folder / "trackers" / "mlflow.json").read_text())["run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    report(folder, options, [update(2), evaluation(3)])
    (made,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (made.info.run_id, made.info.run_name, made.info.status) == (run_id, "my-run", "FINISHED")
    assert made.data.params["rollout.prompts"] == "16"

    def drawn(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]

    assert drawn("update/reward_mean") == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert drawn("evaluation/score") == [(0, 0.25), (3, 0.25)]
    artifacts = [each.path for each in client.list_artifacts(run_id, "samples")]
    assert artifacts == [f"samples/update-{number:06d}.json" for number in range(3)]


def test_a_server_that_cannot_be_reached_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = tmp_path / "run"
    options = begin(folder, sinks=["mlflow"], mlflow={"uri": "http://127.0.0.1:9"})
    report(folder, options, [update(0)])
    first, last = (record.getMessage() for record in caplog.records if "tracker" in record.getMessage())
    assert first.startswith("`on_start` of the tracker `mlflow` raised ")
    assert last == "the tracker `mlflow` did not start, and missed 1 lines of the run"
