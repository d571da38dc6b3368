"""Calls what runs an event loop of its own, from anywhere: a script, a thread, or a notebook, whose loop is running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.2  # Python runs the handler of a signal between two waits


def call_apart(function: Callable[[], T], on_interrupt: Callable[[], None] | None = None) -> T:
    """Calls a function, in a thread of its own if an event loop runs in this one, and returns what it returns.

    With `on_interrupt`, the first Ctrl-C in the meantime calls it, and the wait goes on. A second, or one without it,
    raises `KeyboardInterrupt`; the thread is not waited for then.
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
    thread.start()
    interrupted = on_interrupt is None
    while thread.is_alive():
        try:
            thread.join(TICK_S)
        except KeyboardInterrupt:
            if interrupted or on_interrupt is None:
                raise
            interrupted = True
            on_interrupt()
    if errors:
        raise errors[0]
    return results[0]
