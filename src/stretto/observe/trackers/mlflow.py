"""MLflow: a server, or a database of its own. A resumed run continues by the id of MLflow's run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.observe.listeners import Outcome
from stretto.observe.options import MlflowOptions
from stretto.observe.trackers.sample_rows import Row
from stretto.observe.trackers.tracker import TrackedRun, Tracker

MOST_PARAMETERS = 100  # in one request
MOST_CHARACTERS = 500  # of a parameter
ENDS: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Sends to MLflow."""

    _client: Any = None
    _run_id = ""
    _uri = ""

    @property
    def _own(self) -> MlflowOptions:
        return self._options.mlflow or MlflowOptions()

    @property
    def destination(self) -> str:
        where = f" at {self._uri}" if self._uri else ""
        return f"experiment `{self._own.experiment}`{where}"

    def open(self, run: TrackedRun) -> dict[str, str]:
        import mlflow
        from mlflow.entities import Param

        own = self._own
        self._uri = run.ids.get("uri") or own.uri or mlflow.get_tracking_uri()
        self._client = client = mlflow.MlflowClient(tracking_uri=self._uri)
        if "run_id" in run.ids:
            self._run_id = run.ids["run_id"]
            client.update_run(self._run_id, status="RUNNING")
            return dict(run.ids)
        found = client.get_experiment_by_name(own.experiment)
        experiment = client.create_experiment(own.experiment) if found is None else found.experiment_id
        self._run_id = client.create_run(experiment, run_name=own.name or run.name).info.run_id
        parameters = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in run.parameters.items()]
        for begin in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(self._run_id, params=parameters[begin : begin + MOST_PARAMETERS])
        return {"uri": self._uri, "run_id": self._run_id}

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1_000)
        metrics = [Metric(f"{kind}/{name}", value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def table(self, update: int, rows: Sequence[Row]) -> None:
        text = json.dumps(rows, indent=1, ensure_ascii=False)
        self._client.log_text(self._run_id, text, f"samples/update-{update:06d}.json")

    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        if summary:
            self._client.log_dict(self._run_id, dict(summary), "summary.json")
        self._client.set_terminated(self._run_id, status=ENDS.get(outcome, "FINISHED"))
