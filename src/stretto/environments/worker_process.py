"""One worker process as its pool sees it: its start, its pipes, what it prints, and its end.

Reward functions (`reward_pool.py`) and environments (`episode_pool.py`) run in such processes. `worker_child.py` is the
other side.

- A worker gets a short list of environment variables (`reward_environment.py`), so that it sees no secret that the
  recipe does not name.
- With `task.sandbox`, a worker enters a sandbox before it imports anything of the user's (`sandbox.py`).
- Each line that it prints goes to `on_output`, never directly to the terminal.
- It leads a process group, so the processes that it has started are killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stretto.environments.reward_environment import worker_environment
from stretto.environments.reward_pipes import LENGTH, BrokenFrameError, max_frame_bytes, request_frame
from stretto.environments.sandbox import Limits

START_S = 120.0  # for importing the user's module
EXIT_S = 10.0  # for a killed worker to exit
LAST_OUTPUT_S = 1.0  # for reading the last lines that it printed
MAX_LINE = 2_000  # characters of one printed line

Read = TypeVar("Read")


class GreetingError(Exception):
    """A worker that did not answer its first message; says why."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options that workers of every kind have."""

    on_output: Callable[[str], None]  # gets every line that a worker prints
    extra_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    sandbox: Limits | None = None  # the limits of a sandbox; None: no sandbox
    strict_sandbox: bool = False  # refuse a machine on which a part of the sandbox does not hold


class WorkerProcess:
    """A worker process that was started. `marks` is memory that it shares with the pool."""

    def __init__(
        self, process: asyncio.subprocess.Process, marks: mmap.mmap, listener: asyncio.Task[None], folder: str | None
    ) -> None:
        self.marks = marks
        self._process = process
        self._listener = listener  # reads what it prints; ends with it
        self._folder = folder  # of its sandbox; removed after it

    @classmethod
    async def spawn(cls, module: str, marks: bytes, options: WorkerOptions) -> WorkerProcess:
        """Starts a process that calls `main` of `module`, with shared memory that holds `marks`."""
        with tempfile.TemporaryFile() as memory:
            memory.truncate(mmap.PAGESIZE)
            shared = mmap.mmap(memory.fileno(), len(marks))
            shared[:] = marks
            paths = [os.getcwd(), *(path or os.getcwd() for path in sys.path)]
            folder = None if options.sandbox is None else tempfile.mkdtemp(prefix="stretto-sandbox-")
            sandbox = None if options.sandbox is None else (folder, tuple(options.sandbox), options.strict_sandbox)
            call = f"from {module} import main; main({memory.fileno()}, {sandbox!r})"
            printed, prints = os.pipe()
            listener = asyncio.create_task(_listen(printed, options.on_output), name="worker output")
            try:
                # Not `multiprocessing`: its `spawn` runs the parent's main module again, and imports torch with it.
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    f"import sys; sys.path[:] = {list(dict.fromkeys(paths))!r}; {call}",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=prints,  # not asyncio's pipe: `wait` would block while another process has it open
                    pass_fds=[memory.fileno()],
                    start_new_session=True,
                    env=worker_environment(options.extra_environment, folder),
                )
            finally:
                os.close(prints)  # the listener ends when no process has it open
        return cls(process, shared, listener, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Sends frames. Never blocks: what the pipe does not take is kept here."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def read(self, max_bytes: Callable[[], int]) -> bytes:
        """Reads the next frame. Raises `BrokenFrameError` if it is longer than `max_bytes` says when it begins."""
        assert self._process.stdout is not None
        (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if size > (limit := max_bytes()):
            raise BrokenFrameError(f"a frame of {size} bytes, more than the limit of {limit}")
        return await self._process.stdout.readexactly(size)

    async def greeted(self, message: Any, read: Callable[[bytes], Read], within_s: float) -> Read:
        """Sends the first message and returns what `read` makes of its answer, which comes after the user's imports.

        Raises `GreetingError`, which says why there is no answer. The process has then ended, as after any other error.
        """
        try:
            self.write(request_frame(message))
            async with asyncio.timeout(within_s):
                return read(await self.read(lambda: max_frame_bytes(0)))
        except TimeoutError:
            why = f"it could not be imported within {within_s:g} s"
        except BrokenFrameError as broken:
            why = f"its module wrote something to the worker's pipe while it was imported: {broken}"
        except asyncio.IncompleteReadError:
            why = f"it {how_it_ended(await self.ended())} while it was imported"
        except BaseException:
            await self.end()
            raise
        await self.end()
        raise GreetingError(why)

    def kill(self) -> None:
        """Kills the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kills the process and waits for its end, as `ended` does."""
        self.kill()
        return await self.ended()

    async def ended(self) -> int:
        """Waits for the process to exit and for the last lines that it printed; returns the exit code.

        Both waits have a limit: a process that it started outside of its group may keep the pipes open.
        """
        ending = asyncio.create_task(self._process.wait(), name="end of a worker")
        for task, timeout_s in ((ending, EXIT_S), (self._listener, LAST_OUTPUT_S)):
            await asyncio.wait([task], timeout=timeout_s)
            task.cancel()
        await asyncio.gather(ending, self._listener, return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        if not self._listener.cancelled() and (error := self._listener.exception()) is not None:
            raise error
        code = self._process.returncode
        return -signal.SIGKILL if code is None else code


async def _listen(printed: int, on_output: Callable[[str], None]) -> None:
    """Passes what a worker prints on, line by line, until its process has ended."""
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(printed, "rb", buffering=0)
    )

    def pass_on(line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip()[:MAX_LINE]
        if text:
            on_output(text)

    rest = b""
    try:
        while piece := await reader.read(1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                pass_on(line)
    finally:
        pipe.close()
        if rest:
            pass_on(rest)


def how_it_ended(code: int) -> str:
    """Returns a phrase for an exit code: `was ended by SIGKILL`."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"
