"""The process group of a child: ends all of its processes, also if the child itself is killed.

vLLM's own processes outlive a child that is killed by force, and keep their memory. Ray kills an actor so, with the
processes that the actor has started, and not those that these have started. So each child starts a *guard*,
`python -m stretto.engines.vllm.process_group CHILD ENGINE FOLDER`: a small process that waits for the end of the child,
and then ends the rest of its group. It has a group of its own, so whoever ends that of the child does not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

END_S = 3.0  # for the processes of a group to end when they are asked to
LOOK_S = 0.25  # between two looks of a guard


def end_group(group: int, is_child_gone: Callable[[], bool] = lambda: False) -> None:
    """Ends all processes of a group: by a request, so that shared memory is freed, and then by force.

    `is_child_gone` has the caller take the exit status of its own child, which would count as alive otherwise.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            is_child_gone()
            os.killpg(group, 0)  # raises once the group is empty
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def leads_group() -> bool:
    """True if this process is the first of its group: others in the group belong to it."""
    return os.getpgid(0) == os.getpid()


def start_guard(folder: str) -> None:
    """Starts the guard of this process, the child of an engine. Does nothing if this process does not lead its group.

    A child that is killed together with its engine leaves `folder`, which the guard removes. Otherwise the engine does.
    """
    if leads_group():
        own, engine = str(os.getpid()), str(os.getppid())
        subprocess.Popen(
            [sys.executable, "-m", "stretto.engines.vllm.process_group", own, engine, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def guard(child: int, engine: int, folder: str) -> None:
    """Waits until the child is gone. Then ends the rest of its group, and removes the folder if the engine is gone."""
    while os.getppid() == child:
        time.sleep(LOOK_S)
    end_group(child)
    deadline = time.monotonic() + END_S
    while Path(folder).exists() and time.monotonic() < deadline:
        try:
            os.kill(engine, 0)
        except (ProcessLookupError, PermissionError):  # it is gone; another user may have its number
            shutil.rmtree(folder, ignore_errors=True)
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    guard(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
