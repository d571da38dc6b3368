"""What Ctrl-C does to a run.

| when                               | what it does                                                       | status |
|------------------------------------|--------------------------------------------------------------------|--------|
| while it starts                    | ends the run                                                       | 130    |
| while it runs                      | stops at the next update boundary; again: ends the process at once | 130    |
| after the last update              | ends the run; `--resume` writes the policy                         | 130    |
| after `summary.json` says finished | leaves out the last evaluation, where that is not over             | 0      |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stopped_by_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second ends the process, whatever its threads are doing. So does SIGTERM, but
    for the second. Does nothing outside of the main thread."""
    running = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        stop()
        running.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, _end_at_once)

    try:
        running.add_signal_handler(signal.SIGINT, interrupt)
        running.add_signal_handler(signal.SIGTERM, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a platform without it
        yield
        return
    try:
        yield
    finally:
        running.remove_signal_handler(signal.SIGINT)
        running.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGINT, before)


def ignore_interrupts() -> None:
    """From now on Ctrl-C does nothing: the outcome is decided, and what is left is to say so and to end the process.

    Ending takes a second, in which an interrupt would be what the process is said to have ended by.
    """
    with contextlib.suppress(ValueError):  # not the main thread, which nobody interrupts
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_at_once(*_: object) -> None:
    """End without waiting for anybody: the journal is whole at every moment, and so is the last checkpoint."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # the live table hides the cursor
    os._exit(130)
