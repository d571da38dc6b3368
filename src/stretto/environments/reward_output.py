"""Keeps what a reward function prints: all lines in a file of the run folder, the first ones also on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from stretto.errors import printable

MAX_SHOWN = 10  # lines; a `print` in a reward is called for every completion


class RewardOutput:
    """Takes one line per call. Lines go to `path` once `after` exists; the first ones also go to `show`.

    If the file cannot be written, one warning goes to `show` and the run continues without it.
    """

    def __init__(self, path: Path, show: Callable[[str], None], *, after: Path | None = None) -> None:
        """`after` is the folder of `path` by default."""
        self._path = path
        self._after = after or path.parent
        self._show = show
        self._file: TextIO | None = None
        self._num_lines = 0
        self._broken = False

    def __call__(self, line: str) -> None:
        self._num_lines += 1
        if self._num_lines <= MAX_SHOWN:
            self._show(f"reward: {printable(line)}")
        elif self._num_lines == MAX_SHOWN + 1:
            self._show(f"reward: (more output follows; all of it is in {self._path})")
        if self._broken:
            return
        try:
            self._keep(line)
        except OSError as error:
            self._broken = True
            self._show(f"warning: `{self._path}` cannot be written: {error}; the output of the reward is not kept")

    def _keep(self, line: str) -> None:
        if self._file is None and self._after.exists():
            self._file = self._path.open("a", encoding="utf-8")
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a failed write has been reported
                file.close()
