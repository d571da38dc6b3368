"""Where goes what a reward function prints: a file of the run, and its first lines to the person who watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

MOST_SHOWN = 10  # lines; a `print` in a reward is called for every completion


class RewardOutput:
    """Takes one line after another. All of them go to `path` once its folder is there, the first also to `show`.

    A file that cannot be written is told once, and costs nothing but its lines.
    """

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self._path = path
        self._show = show
        self._file: TextIO | None = None
        self._num_lines = 0
        self._broken = False

    def __call__(self, line: str) -> None:
        self._num_lines += 1
        if self._num_lines <= MOST_SHOWN:
            self._show(f"reward: {line}")
        elif self._num_lines == MOST_SHOWN + 1:
            self._show(f"reward: (it prints more; all of it is in {self._path})")
        if self._broken:
            return
        try:
            self._keep(line)
        except OSError as error:
            self._broken = True
            self._show(f"warning: `{self._path}` cannot be written: {error}; what the reward prints is not kept")

    def _keep(self, line: str) -> None:
        if self._file is None and self._path.parent.is_dir():
            self._file = self._path.open("a", encoding="utf-8")
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()

    def close(self) -> None:
        """Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written is told already
                file.close()
