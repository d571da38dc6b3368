"""A run whose own thread is held up, by an environment that blocks, says where; for too long, and the run ends.

Everything of a run happens in one thread, deadlines too: while it is held up none of them can come. So another thread
looks whether it still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

PACKAGE = str(Path(__file__).parents[1])
BEAT_S = 1.0
TOLD_AFTER_S = 10.0
LEAST_S = 60.0  # before a run ends: a busy machine, or a stopped one, holds threads up too
FAILED = 2  # the status of a failed run


@contextlib.contextmanager
def told_when_blocked(
    stall_s: float, *, told_after_s: float = TOLD_AFTER_S, least_s: float = LEAST_S
) -> Iterator[None]:
    """For the loop that runs in this thread: warn when it is held up, and after `stall_s` end the process."""
    running, thread = asyncio.get_running_loop(), threading.get_ident()
    done, answers = threading.Event(), 0
    next_one: asyncio.Handle
    limit_s = max(stall_s, least_s)
    beat_s = min(BEAT_S, told_after_s / 4)

    def answer() -> None:
        nonlocal answers, next_one
        answers += 1
        next_one = running.call_later(beat_s, answer)

    def watch() -> None:
        heard, told_of, beats = 0, 0, 0
        while not done.wait(beat_s):
            # Counted in beats of this thread: the time in which the whole process was stopped is nobody's fault.
            heard, beats = (heard, beats + 1) if answers == heard else (answers, 0)
            held_s = beats * beat_s
            if held_s < told_after_s:
                continue
            frame = sys._current_frames()[thread]
            what = (
                f"the run's own thread has been held up for {held_s:.0f} s at {place_of(frame)}, and nothing else can "
                "happen meanwhile: what blocks belongs in `asyncio.to_thread`"
            )
            if held_s >= limit_s and not done.is_set():
                sys.stderr.write(
                    f"error: {what}. That is longer than `runtime.stall_seconds = {stall_s:g}` and {least_s:g} s; the "
                    "run ends here, and `--resume` goes on with it\n"
                )
                sys.stderr.flush()
                os._exit(FAILED)
            if told_of != heard:
                log.warning("%s", what)
                told_of = heard

    next_one = running.call_soon(answer)
    watcher = threading.Thread(target=watch, name="blocked", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        next_one.cancel()
        watcher.join()


def place_of(frame: FrameType) -> str:
    """Where a thread is: the line of others' code that ours has called; where there is none, its innermost."""
    found, at = frame, frame.f_back
    while at is not None and not found.f_code.co_filename.startswith(PACKAGE):
        if at.f_code.co_filename.startswith(PACKAGE):
            frame = found
            break
        found, at = at, at.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} (`{frame.f_code.co_name}`)"
