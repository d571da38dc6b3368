"""Logs how long each phase of the start of a run took, and tells of a phase that takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

LONG_S = 5.0


@contextlib.contextmanager
def start_phase(
    log: logging.Logger, name: str, say: Callable[[str], None] | None = None, *, long_s: float = LONG_S
) -> Iterator[None]:
    """Logs the seconds of the block under a name, at the level INFO; nothing if it raises.

    `say` is told the name once, by another thread, if the block still runs after `long_s` seconds.
    """
    began = time.monotonic()
    with contextlib.nullcontext() if say is None else _told(log, say, f"starting: {name}", long_s):
        yield
    log.info("start: %s: %.2f s", name, time.monotonic() - began)


@contextlib.contextmanager
def _told(log: logging.Logger, say: Callable[[str], None], text: str, long_s: float) -> Iterator[None]:
    """Says a text once if the block still runs after some seconds; never after its end."""

    def tell() -> None:
        try:
            say(text)
        except Exception:  # what shows the run fails: the next message, from the run's own thread, raises it there
            log.exception("a message could not be shown: %s", text)

    timer = threading.Timer(long_s, tell)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
