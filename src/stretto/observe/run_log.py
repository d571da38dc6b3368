"""`RUN/run.log`: everything that a run says, with the time: messages, updates, evaluations, warnings, its error.

It has the log lines of this package from INFO on under `stretto train`, and from DEBUG on with `-vv`.

The file has at most `MOST_BYTES`; older lines are in `run.log.1`. A resumed run appends. Control characters are
escaped, as on the terminal. A log that cannot be written never ends a run: it is left out, with one warning.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from stretto.errors import printable
from stretto.observe.progress import Observer, describe_evaluation, describe_update
from stretto.types import EvaluationResult

NAME = "run.log"
MOST_BYTES = 10_000_000
MOST_EARLY = 1_000  # lines that are kept in memory until the run folder is that of a run
FORMAT = "%(levelname)s %(name)s: %(message)s"
OURS = "stretto"  # the logger of this package


class RunLog(logging.Handler):
    """Writes log records, and what the run itself says, to a file. For any thread."""

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        """Writes nothing before the folder has its `config.toml`: until then it may be that of no run."""
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter(FORMAT))
        self._path = folder / NAME
        self._after = folder / "config.toml"
        self._most_bytes = most_bytes
        self._early: deque[str] = deque(maxlen=MOST_EARLY)
        self._file: TextIO | None = None
        self._broken = False

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Takes in log records inside the block, and the error that ends it.

        A program that has set up no logging still sees warnings on its standard error, as without the file.
        """
        root, ours = logging.getLogger(), logging.getLogger(OURS)
        set_up = bool(root.handlers or ours.handlers)
        handlers = [self] if set_up or logging.lastResort is None else [self, logging.lastResort]
        place = root if set_up else ours
        for handler in handlers:
            place.addHandler(handler)
        try:
            yield
        except KeyboardInterrupt:
            self.say("the run was interrupted")
            raise
        except BaseException as error:
            self.say(f"the run ended with {''.join(traceback.format_exception(error)).rstrip()}", "ERROR")
            raise
        finally:
            for handler in handlers:
                place.removeHandler(handler)
            self.close()

    def say(self, text: str, level: str = "INFO") -> None:
        """Writes what the run says."""
        with self.lock or contextlib.nullcontext():
            self._write(f"{level} {text}")

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO or record.name.partition(".")[0] == OURS:
            self._write(self.format(record))

    def _write(self, text: str) -> None:
        """Writes lines, or keeps them until the folder is that of a run. The lock is held."""
        if self._broken:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._early.append(f"{stamp} {printable(text, lines=True)}\n".replace("\n", "\n    ").removesuffix("    "))
        try:
            if self._file is None and self._after.exists():
                self._file = self._path.open("a", encoding="utf-8")
            if self._file is not None:
                self._file.write("".join(self._early))
                self._file.flush()
                self._early.clear()
                self._rotate(self._file)
        except (OSError, ValueError) as error:
            self._broken = True
            self._early.clear()
            logging.getLogger(__name__).warning("`%s` cannot be written, and is left out: %s", self._path, error)

    def _rotate(self, file: TextIO) -> None:
        """Begins a new file if this one is full. The one before the last is deleted."""
        if file.tell() >= self._most_bytes:
            file.close()
            self._file = None
            self._path.replace(self._path.with_suffix(".log.1"))

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        with self.lock or contextlib.nullcontext():
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        super().close()


class Logged:
    """An observer that also writes to the log what it shows; every update, not only some of them."""

    def __init__(self, observer: Observer, log: RunLog, steps: int) -> None:
        self._observer = observer
        self._log = log
        self._steps = steps
        self.status = observer.status
        self.close = observer.close

    def message(self, text: str) -> None:
        self._log.say(text)
        self._observer.message(text)

    def updated(self, line: Mapping[str, Any]) -> None:
        for warning in line.get("warnings", ()):
            self._log.say(warning, "WARNING")
        self._log.say(describe_update(line, self._steps))
        self._observer.updated(line)

    def evaluated(self, result: EvaluationResult) -> None:
        self._log.say(describe_evaluation(result))
        self._observer.evaluated(result)
