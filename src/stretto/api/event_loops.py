"""Calls what runs an event loop of its own, from anywhere: a script, a thread, or a notebook, whose loop is running."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from stretto.run.interrupts import handled

T = TypeVar("T")

TICK_S = 0.2  # Python runs the handler of a signal between two waits


def call_apart(function: Callable[[], T], on_interrupt: Callable[[], None] | None = None) -> T:
    """Calls a function, in a thread of its own if an event loop runs in this one, and returns what it returns.

    With `on_interrupt`, the first Ctrl-C in the meantime calls it, and the wait goes on; so does SIGTERM. A second
    Ctrl-C raises `KeyboardInterrupt`; the thread is not waited for then.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="stretto", daemon=True)
    with contextlib.nullcontext() if on_interrupt is None else _passed_on(on_interrupt):
        thread.start()
        while thread.is_alive():
            thread.join(TICK_S)
    if errors:
        raise errors[0]
    return results[0]


@contextlib.contextmanager
def _passed_on(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Has signals call `on_interrupt`. Those of a running event loop would cancel a task that cannot be cancelled."""
    count = 0

    def interrupt(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        on_interrupt()

    with handled({signal.SIGINT: interrupt, signal.SIGTERM: lambda *_: on_interrupt()}):
        yield
