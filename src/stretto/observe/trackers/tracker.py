"""The base of the trackers: what a tracker gets of a run, whatever its package is.

A tracker runs in a thread of its own (`observe/listeners.py`), so it may block, and may raise. A tracker that cannot
start gets nothing more; the number of lines that it missed is logged at the end.

A resumed run continues the tracker's own run, by the ids that are kept in `RUN/trackers/`. A tracker that is added at
`--resume` first gets the lines of the updates that the run has made before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.observe.listeners import Callback, LiveRun, Outcome
from stretto.observe.options import ObserveOptions
from stretto.observe.trackers.chosen_metrics import chosen, step_of
from stretto.observe.trackers.sample_rows import Row, Samples
from stretto.store.recipe_keys import flat_keys

log = logging.getLogger(__name__)

FOLDER = "trackers"  # in the run folder: the ids of the trackers' own runs

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The facts of a run that a tracker is told when it starts."""

    folder: Path
    name: str  # of the run folder
    recipe: Mapping[str, Any]  # `config.toml`
    ids: Mapping[str, str]  # those that `Tracker.open` returned when the run began; empty for a new run

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the recipe by dotted key."""
        return dict(flat_keys(self.recipe))


class Tracker(Callback, ABC):
    """One tracker. A subclass sends numbers and tables; this class decides which, and keeps the ids."""

    takes_tables = True

    def __init__(self, name: str, options: ObserveOptions, say: Callable[[str], None]) -> None:
        """Imports nothing. `name` is that of `observe.sinks`; `say` tells the user where to look."""
        self.name = name
        self._options = options
        self._say = say
        self._run: TrackedRun | None = None  # None: not started, or could not
        self._samples: Samples | None = None
        self._is_new = True  # it knows nothing of the run yet
        self._got_lines = False
        self._missed = 0

    @property
    @abstractmethod
    def destination(self) -> str:
        """The place where the numbers go, in words."""

    def check(self) -> None:
        """Raises `RecipeError` for what can be known before a run, such as a missing key. Sends nothing."""

    @abstractmethod
    def open(self, run: TrackedRun) -> dict[str, str]:
        """Begins or continues the tracker's own run. Returns the ids by which a resumed run continues it."""

    def resume_at(self, step: int) -> None:
        """Called once before the first line, with its step: what a killed run had sent from there on is void."""

    @abstractmethod
    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of an update or an evaluation, which `kind` tells."""

    @abstractmethod
    def table(self, update: int, rows: Sequence[Row]) -> None:
        """Sends samples of an update."""

    @abstractmethod
    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        """Ends the tracker's run, and waits until all is sent. `summary` is empty if the run left none."""

    # -- the events of the run -----------------------------------------------------------------------------------------

    def on_start(self, run: LiveRun) -> None:
        ids = _read_ids(run.folder, self.name)
        recipe = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
        told = TrackedRun(run.folder, run.folder.resolve().name, recipe, ids)
        self._is_new = not ids
        made = self.open(told)
        self._run = told
        if self._options.samples and self.takes_tables:
            self._samples = Samples(run.folder, self._options.samples)
        if made != ids:
            _write_ids(run.folder, self.name, made)
        self._say(f"{self.name}: {self.destination}")

    def on_update(self, line: dict[str, Any]) -> None:
        self._on_line(line)
        if self._samples is not None and (rows := self._samples.rows(line["update"])):
            self.table(line["update"], rows)

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self._on_line(line)

    def on_end(self, run: LiveRun) -> None:
        if self._run is None:
            log.warning("the tracker `%s` did not start, and missed %d lines of the run", self.name, self._missed)
            return
        if self._samples is not None:
            self._samples.close()
        summary: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # a run that failed has none
            summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        self.close(run.outcome, summary)

    def _on_line(self, line: Line) -> None:
        if self._run is None:
            self._missed += 1
            return
        if not self._got_lines:
            self._got_lines = True
            self.resume_at(0 if self._is_new else step_of(line))
            for earlier in _earlier(self._run.folder, line):
                if self._is_new or (step_of(earlier) >= step_of(line) and self.purges):
                    self._send(earlier)
        self._send(line)

    @property
    def purges(self) -> bool:
        """True if `resume_at` makes the tracker forget also valid lines of that step, which are sent again."""
        return False

    def _send(self, line: Line) -> None:
        self.log(line["kind"], step_of(line), chosen(line, self._options.metrics))


def _earlier(folder: Path, first: Line) -> list[Line]:
    """Returns the lines of the run before the first one of this session. `metrics.jsonl` has them, and perhaps it."""
    lines: list[Line] = []
    with contextlib.suppress(OSError):
        for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                line = json.loads(text)
                if (line["kind"], line["at"]) == (first["kind"], first["at"]):
                    break
                lines.append(line)
    return lines


def _read_ids(folder: Path, name: str) -> dict[str, str]:
    try:
        ids = json.loads((folder / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ids if isinstance(ids, dict) else {}


def _write_ids(folder: Path, name: str, ids: Mapping[str, str]) -> None:
    path = folder / FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(ids), encoding="utf-8")
    scratch.replace(path)
