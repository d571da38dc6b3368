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
import threading
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def stopped_by_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second ends the process, whatever its threads are doing. So does SIGTERM, but
    for the second. Does nothing outside of the main thread."""
    running = asyncio.get_running_loop()

    # Not the loop's own handlers: those wait for whatever holds its thread up.
    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, _end_at_once)
        running.call_soon_threadsafe(stop)

    def terminate(*_: object) -> None:
        running.call_soon_threadsafe(stop)

    with handled({signal.SIGINT: interrupt, signal.SIGTERM: terminate}):
        yield


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Signals go to these handlers, and afterwards to those that they went to before. Does nothing outside of the main
    thread, where Python lets nobody handle a signal: whoever has the main thread decides there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


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
