"""TensorBoard: event files, which `tensorboard --logdir` shows.

A resumed run writes to the same folder. Its first event tells TensorBoard to forget what a killed run had written from
that step on.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.observe.listeners import Outcome
from stretto.observe.options import TensorboardOptions
from stretto.observe.trackers.event_files import EventFile
from stretto.observe.trackers.sample_rows import Row
from stretto.observe.trackers.tracker import TrackedRun, Tracker


class TensorboardTracker(Tracker):
    """Writes event files."""

    _file: EventFile | None = None  # made at the first line
    _folder: Path | None = None
    _recipe: str = ""

    @property
    def destination(self) -> str:
        folder = (self._options.tensorboard or TensorboardOptions()).folder
        return f"`tensorboard --logdir {self._folder or folder or 'RUN/tensorboard'}`"

    def open(self, run: TrackedRun) -> dict[str, str]:
        if run.ids:
            self._folder = Path(run.ids["folder"])
        elif (asked := (self._options.tensorboard or TensorboardOptions()).folder) is not None:
            self._folder = Path(asked).absolute() / run.name
        else:
            self._folder = run.folder.absolute() / "tensorboard"
        self._recipe = "\n".join(f"    {key} = {value!r}" for key, value in run.parameters.items())
        return {"folder": str(self._folder)}

    @property
    def purges(self) -> bool:
        return True

    def resume_at(self, step: int) -> None:
        assert self._folder is not None
        self._file = EventFile(self._folder, purge_step=step or None)
        self._file.text("recipe/text_summary", self._recipe, step)  # a resumed run may have another

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        assert self._file is not None
        self._file.numbers(step, {f"{kind}/{name}": value for name, value in numbers.items()})

    def table(self, update: int, rows: Sequence[Row]) -> None:
        assert self._file is not None
        lines = ["|".join(map(_cell, rows[0])), "|".join("---" for _ in rows[0])]
        lines += ["|".join(map(_cell, row.values())) for row in rows]
        self._file.text("samples/text_summary", "\n".join(f"|{line}|" for line in lines), update)

    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()


def _cell(value: object) -> str:
    """Returns a value as a cell of Markdown: the output of a model is never markup."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")
