"""The inside of a worker process, whatever it runs: its pipes, its end, and the processes that it forks.

- Frames (`reward_pipes.py`) arrive on standard input and leave on standard output. What the user's code prints goes to
  standard error, which the pool reads.
- When the pool's process ends, for whatever reason, reading the input ends the worker too.
- A process that the user's code forks holds neither pipe. It exits where it would return from that code.

Imports only the standard library, so that workers start fast.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, BinaryIO, NoReturn

from stretto.environments.reward_pipes import LENGTH

SandboxArguments = tuple[str, tuple[int, int, int], bool]
"""The folder and the limits of a sandbox, and True if it must hold in all parts."""


def open_pipes(sandbox: SandboxArguments | None) -> tuple[BinaryIO, BinaryIO, str | None]:
    """Makes this process a worker. Returns the pipe to read, the pipe to write, and why the sandbox is not enough.

    The pipe to read is unbuffered: `select` does not see what a buffer holds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    refusal = None if sandbox is None else enter_sandbox(*sandbox)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb")
    keep_from_copies(requests, answers)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, answers, refusal


def enter_sandbox(folder: str, limits: tuple[int, int, int], strict: bool) -> str | None:
    """Enters a sandbox. Returns why that is not enough, or None."""
    from stretto.environments.sandbox import Limits, enter, missing

    gaps = missing(enter(folder, Limits(*limits)))
    if not strict or not gaps:
        return None
    return f"`task.sandbox.strict = true`, and on this machine the sandbox has gaps: {'; '.join(gaps)}"


def end() -> NoReturn:
    """Kills this process and those that it has started, because the pool is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_copy(owner: int, error: BaseException | None = None) -> None:
    """Exits if this is a process that the user's code forked, which has returned from that code or raised `error`.

    Only the process `owner` may answer the pool.
    """
    if os.getpid() == owner:
        return
    code: object = 0
    if isinstance(error, SystemExit):
        code = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the process exits; there is nowhere to report it
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def keep_from_copies(*pipes: BinaryIO) -> None:
    """Replaces the pipes by `/dev/null` in every process that is forked from now on."""
    nothing = os.open(os.devnull, os.O_RDWR)
    numbers = [pipe.fileno() for pipe in pipes]

    def replace() -> None:
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)

    os.register_at_fork(after_in_child=replace)


def read_frame(pipe: BinaryIO) -> Any:
    """Reads the next message. Ends the process if there is none, because the pool is gone."""
    return pickle.loads(_read(pipe, LENGTH.unpack(_read(pipe, LENGTH.size))[0]))


def _read(pipe: BinaryIO, size: int) -> bytes:
    parts = []
    while size > 0:
        part = pipe.read(size)
        if not part:
            end()
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(pipe: BinaryIO, frame: bytes) -> None:
    """Writes a frame. Ends the process if the pool is gone."""
    try:
        pipe.write(frame)
        pipe.flush()
    except BrokenPipeError:
        end()


@types.coroutine
def marked(
    awaitable: Awaitable[Any], enter: Callable[[], None], leave: Callable[[BaseException | None], None]
) -> Generator[Any, Any, Any]:
    """Awaits it and calls `enter` before and `leave` after every step, so that a step that blocks the loop has a mark.

    `leave` gets the exception that the step raised, or None.
    """
    steps = awaitable.__await__()
    error: BaseException | None = None
    while True:
        enter()
        try:
            waiting = next(steps) if error is None else steps.throw(error)
        except StopIteration as stop:
            leave(None)
            return stop.value
        except BaseException as raised:
            leave(raised)
            raise
        leave(None)
        error = None
        try:
            yield waiting
        except BaseException as raised:  # mostly a cancellation; the next step gets it
            error = raised
