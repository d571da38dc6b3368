"""Trackio: a local database that `trackio show` draws, or a Space of the hub. A resumed run continues by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.observe.listeners import Outcome
from stretto.observe.options import TrackioOptions
from stretto.observe.trackers.sample_rows import Row
from stretto.observe.trackers.tracker import TrackedRun, Tracker


class TrackioTracker(Tracker):
    """Sends to Trackio."""

    _handle: Any = None  # trackio's run

    @property
    def _own(self) -> TrackioOptions:
        return self._options.trackio or TrackioOptions()

    @property
    def destination(self) -> str:
        if self._own.space is not None:
            return f"the Space `{self._own.space}`"
        return f"`trackio show --project {self._own.project}`"

    def open(self, run: TrackedRun) -> dict[str, str]:
        import trackio

        own = self._own
        name = run.ids.get("name") or own.name or run.name
        self._handle = trackio.init(
            project=own.project,
            name=name,
            space_id=own.space,
            config=dict(run.parameters),
            resume="allow" if run.ids else "never",
            embed=False,
        )
        return {"name": self._handle.name}

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._handle.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def table(self, update: int, rows: Sequence[Row]) -> None:
        import trackio

        made = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._handle.log({"samples": made}, step=update)

    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        self._handle.finish()
