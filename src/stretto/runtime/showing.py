"""Long waits at the start of a run, told while they last: a person at a terminal sees what is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

FIRST_S = 3.0  # until the first line
SAY_S = 10.0  # between two lines


async def shown(work: Awaitable[Result], what: Callable[[], str], say: Callable[[str], None]) -> Result:
    """Do something; after `FIRST_S`, and every `SAY_S` until it is done, say what it waits for, and for how long."""
    began, task = time.monotonic(), asyncio.ensure_future(work)
    wait_s = FIRST_S
    try:
        while not (await asyncio.wait({task}, timeout=wait_s))[0]:
            say(f"waiting for {what()}, for {time.monotonic() - began:.0f} s now")
            wait_s = SAY_S
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
