"""Logs how long each phase of the start of a run took, and tells of a phase that takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from stretto.observe.waiting import SAY_S

LONG_S = 5.0


@contextlib.contextmanager
def start_phase(
    log: logging.Logger,
    name: str,
    say: Callable[[str], None] | None = None,
    *,
    long_s: float = LONG_S,
    every_s: float = SAY_S,
) -> Iterator[None]:
    """Logs the seconds of the block under a name, at the level INFO; nothing if it raises.

    `say` is told the name, by another thread, if the block still runs after `long_s` seconds, and again every `every_s`
    seconds, with how long it has taken. The loop of the run does this by `report_wait`; here its thread is blocked.
    """
    began, ended = time.monotonic(), threading.Event()

    def tell(say: Callable[[str], None]) -> None:
        try:
            if not ended.wait(long_s):
                say(f"starting: {name}")
            while not ended.wait(every_s):
                say(f"starting: {name}, for {time.monotonic() - began:.0f} s now")
        except Exception:  # what shows the run fails: the next message, from the run's own thread, raises it there
            log.exception("a message could not be shown: `%s` takes long", name)

    teller = None if say is None else threading.Thread(target=tell, args=(say,), name=f"starting: {name}", daemon=True)
    try:
        if teller is not None:
            teller.start()
        yield
    finally:
        ended.set()
        if teller is not None and teller.is_alive():
            teller.join()  # nothing is said after the end
    log.info("start: %s: %.2f s", name, time.monotonic() - began)
