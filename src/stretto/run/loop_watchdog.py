"""Warns if the loop's thread is blocked, for example by an environment, and ends the run if that lasts too long.

Everything in a run happens in this one thread, deadlines included: while it is blocked, none of them can fire. So
another thread checks that it still answers.
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
WARN_AFTER_S = 10.0
LEAST_S = 60.0  # before a run ends: a busy machine, or a stopped one, blocks threads too
FAILED = 2  # the exit status of a failed run


@contextlib.contextmanager
def warn_when_blocked(
    stall_s: float, *, warn_after_s: float = WARN_AFTER_S, least_s: float = LEAST_S
) -> Iterator[None]:
    """Warns when the event loop of this thread is blocked, and ends the process after `stall_s`."""
    running, thread = asyncio.get_running_loop(), threading.get_ident()
    done, answers = threading.Event(), 0
    next_one: asyncio.Handle
    limit_s = max(stall_s, least_s)
    beat_s = min(BEAT_S, warn_after_s / 4)

    def answer() -> None:
        nonlocal answers, next_one
        answers += 1
        next_one = running.call_later(beat_s, answer)

    def watch() -> None:
        heard, warned_at, beats = 0, 0, 0
        while not done.wait(beat_s):
            # Counted in beats of this thread, so that the time in which the whole process was stopped does not count.
            heard, beats = (heard, beats + 1) if answers == heard else (answers, 0)
            held_s = beats * beat_s
            if held_s < warn_after_s:
                continue
            frame = sys._current_frames()[thread]
            what = (
                f"the run's own thread has been held up for {held_s:.0f} s at {place_of(frame)}, and nothing else can "
                "happen meanwhile: what blocks belongs in `asyncio.to_thread`"
            )
            if held_s >= limit_s and not done.is_set():
                sys.stderr.write(
                    f"error: {what}. That is longer than `runtime.stall_seconds = {stall_s:g}` and {least_s:g} s; the "
                    "run ends here, and `--resume` continues it\n"
                )
                sys.stderr.flush()
                os._exit(FAILED)
            if warned_at != heard:
                log.warning("%s", what)
                warned_at = heard

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
    """Returns where a thread is: the line outside of this package that it called, or else its innermost line."""
    found, at = frame, frame.f_back
    while at is not None and not found.f_code.co_filename.startswith(PACKAGE):
        if at.f_code.co_filename.startswith(PACKAGE):
            frame = found
            break
        found, at = at, at.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} (`{frame.f_code.co_name}`)"
