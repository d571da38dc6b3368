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
    timer = None if say is None else threading.Timer(long_s, say, [f"starting: {name}"])
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()  # so that nothing is said after the phase has ended
    log.info("start: %s: %.2f s", name, time.monotonic() - began)
