"""Logs how long each phase of the start of a run took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator


@contextlib.contextmanager
def start_phase(log: logging.Logger, name: str) -> Iterator[None]:
    """Logs the seconds of the block under a name, at the level INFO; nothing if it raises."""
    began = time.monotonic()
    yield
    log.info("start: %s: %.2f s", name, time.monotonic() - began)
