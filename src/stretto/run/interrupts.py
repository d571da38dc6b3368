"""Ctrl-C and SIGTERM: how they stop a run.

| Ctrl-C                     | what it does                                                       | status |
|----------------------------|--------------------------------------------------------------------|--------|
| while it starts            | ends the run, which counts as stopped                              | 130    |
| while it runs              | stops at the next update boundary; again: ends the process at once | 130    |
| after the last update      | ends the run; `--resume` writes the policy                         | 130    |
| during the last evaluation | skips it; the run is finished                                      | 0      |

A process that is killed during the last evaluation leaves a run that `--resume` evaluates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

AGAIN = "; once more ends the process at once"  # what the first Ctrl-C tells about the second


@contextlib.contextmanager
def stopped_by_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Has the first Ctrl-C call `stop`, and the second end the process, whatever its threads are doing.

    SIGTERM calls `stop` every time. Does nothing outside of the main thread.
    """
    running = asyncio.get_running_loop()

    # Not handlers of the event loop: those would wait for whatever holds its thread up.
    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, _end_at_once)
        running.call_soon_threadsafe(stop)

    def terminate(*_: object) -> None:
        running.call_soon_threadsafe(stop)

    with handled({signal.SIGINT: interrupt, signal.SIGTERM: terminate}):
        yield


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Sends signals to these handlers, and afterwards to the earlier ones again.

    Does nothing outside of the main thread: Python handles signals there alone, so its owner decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


def is_interrupt(error: BaseException) -> bool:
    """True if the user or a program ended the run, and not a fault.

    Inside of the event loop an interrupt is a request to cancel the current task. A cancellation without one is a
    fault.
    """
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(RuntimeError):  # there is no event loop
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def ignore_interrupts() -> None:
    """Ignores Ctrl-C from now on: the outcome is decided, and only the closing lines are left to print.

    The process takes a second to end. An interrupt in that second would change its exit status.
    """
    with contextlib.suppress(ValueError):  # not the main thread, which gets no interrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_at_once(*_: object) -> None:
    """Ends the process at once. The journal and the last checkpoint are consistent at every moment."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # the live table hides the cursor
    os._exit(130)
