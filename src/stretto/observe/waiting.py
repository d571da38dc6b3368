"""Reports long waits at the start of a run while they last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

FIRST_S = 3.0  # before the first message
SAY_S = 10.0  # between two messages


async def report_wait(work: Awaitable[Result], subject: Callable[[], str], say: Callable[[str], None]) -> Result:
    """Awaits `work`; after `FIRST_S`, and then every `SAY_S`, says what is waited for and for how long."""
    began, task = time.monotonic(), asyncio.ensure_future(work)
    wait_s = FIRST_S
    try:
        while not (await asyncio.wait({task}, timeout=wait_s))[0]:
            say(f"waiting for {subject()}, for {time.monotonic() - began:.0f} s now")
            wait_s = SAY_S
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
