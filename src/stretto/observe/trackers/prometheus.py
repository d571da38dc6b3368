"""Prometheus: the numbers of the last update and evaluation over HTTP, until the run ends.

By default the port can be reached from this machine alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.observe.listeners import Outcome
from stretto.observe.options import PrometheusOptions
from stretto.observe.trackers.sample_rows import Row
from stretto.observe.trackers.tracker import TrackedRun, Tracker

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusTracker(Tracker):
    """Serves `/metrics`. Each name is `stretto_update_...` or `stretto_evaluation_...`, with the label `run`."""

    takes_tables = False
    _server: Any = None
    _port: int | None = None
    _run_name = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gauges: dict[str, Any] = {}
        self._registry: Any = None

    @property
    def _own(self) -> PrometheusOptions:
        return self._options.prometheus or PrometheusOptions()

    @property
    def destination(self) -> str:
        return f"http://{self._own.host}:{self._port or self._own.port}/metrics"

    def open(self, run: TrackedRun) -> dict[str, str]:
        import prometheus_client

        self._registry = prometheus_client.CollectorRegistry()
        try:
            self._server, _ = prometheus_client.start_http_server(
                self._own.port, addr=self._own.host, registry=self._registry
            )
        except OSError as error:
            raise OSError(
                f"it cannot listen on {self._own.host}:{self._own.port}: {error.strerror}; choose another "
                "`observe.prometheus.port`, or 0 for any"
            ) from error
        self._port = self._server.server_port
        self._run_name = run.name
        return {}

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        number = "number" if kind == "update" else "version"
        for name, value in {number: float(step), **numbers}.items():
            self._set(f"stretto_{kind}_{_NO_NAME.sub('_', name)}", value)

    def table(self, update: int, rows: Sequence[Row]) -> None:
        raise AssertionError("Prometheus takes numbers alone")

    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            from prometheus_client import Gauge

            about = "see docs/metrics.md of Stretto"
            self._gauges[name] = Gauge(name, about, ["run"], registry=self._registry).labels(self._run_name)
        self._gauges[name].set(value)
