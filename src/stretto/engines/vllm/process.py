"""The child process of an engine, as the engine sees it: frames over a pipe, deadlines, and the end of the process.

The child has a process group of its own, with all that vLLM starts. Ending it kills the group: vLLM's workers outlive a
child that was killed. When this process dies, the pipe ends, and the child ends itself. If both are killed at once, as
Ray does, a guard ends the group (`process_group.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from stretto.engines.host_memory import usable_memory
from stretto.engines.vllm import frames
from stretto.engines.vllm.process_group import end_group
from stretto.errors import ChecksumError, EngineError, RecipeError

MODULE = "stretto.engines.vllm.child"
START_S = 540.0  # for the child to import vLLM, load the model and answer
ANSWER_S = 120.0  # for any later call, unless the run has another deadline
NUM_LINES = 12  # of the child's output, in an error
MEMORY_FOLDER = Path("/dev/shm")  # holds files in memory, on Linux
MEMORY_SHARE = 0.1  # of the usable memory that files in memory may take


class ChildProcess:
    """A child that has started, with a folder for weights on their way to it. One thread uses it."""

    def __init__(
        self,
        options: frames.ChildOptions,
        *,
        start_s: float = START_S,
        answer_s: float = ANSWER_S,
        module: str = MODULE,
    ) -> None:
        """Starts the child and waits until its engine is ready. Raises `RecipeError` if it cannot be made.

        `start_s` is the deadline for that, and `answer_s` that of every later call. A load reads the file of the
        weights several times.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="stretto-vllm-", dir=_scratch(options)))
        self._log = self.folder / "child.log"
        self._numbers = itertools.count(1)
        self._answer_s = answer_s
        self._is_closed = False
        self._failure: EngineError | None = None  # that the child has told of
        ours, theirs = socket.socketpair()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(self.folder)],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=_environment(options),
                )
        except BaseException:
            ours.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self._pipe = Connection(ours.detach())
        try:
            answer = self.call(lambda call: frames.Start(call, options), deadline_s=start_s)
        except (EngineError, ChecksumError) as error:
            text, said = str(error), self._last_lines()
            self.close()
            why = text if text.endswith(said) else text + said
            raise RecipeError(f'the engine of `engine.type = "vllm"` cannot be made: {why}') from error
        except BaseException:  # Ctrl-C
            self.close()
            raise
        assert isinstance(answer, frames.Ready)
        self.served_by = answer.served_by

    @property
    def pid(self) -> int:
        """The id of the child, which is that of its process group too."""
        return self._process.pid

    def new_number(self) -> int:
        """Returns a number for a call, a load or a request that this child never had before."""
        return next(self._numbers)

    def send(self, frame: frames.ToChild) -> None:
        """Sends a frame. Raises `EngineError` if the child is gone."""
        try:
            self._pipe.send(frame)
        except OSError as error:
            raise self._gone() from error

    def receive(self, timeout_s: float) -> frames.FromChild | None:
        """Returns the next frame, or None if none comes in time. Raises `EngineError`, every time, if it is gone."""
        if self._failure is not None:
            raise self._failure
        try:
            frame: frames.FromChild | None = self._pipe.recv() if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(frame, frames.Failure):
            self._failure = EngineError(f"{frame.text}{self._last_lines()}")
            raise self._failure
        return frame

    def call(
        self,
        make: Callable[[int], frames.ToChild],
        *,
        on_tokens: Callable[[frames.Tokens], None] = lambda tokens: None,
        deadline_s: float | None = None,
    ) -> frames.Ready | frames.Loaded | None:
        """Makes a call and returns its answer. `on_tokens` gets the tokens that come before it.

        `deadline_s` None: that of every call.
        Raises `ChecksumError` if weights were refused, and `EngineError` for any other refusal or a late answer.
        """
        number = self.new_number()
        frame = make(number)
        self.send(frame)
        within_s = self._answer_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + within_s
        while True:
            left = deadline - time.monotonic()
            got = self.receive(max(0.0, left))
            if isinstance(got, frames.Tokens):
                on_tokens(got)
            elif isinstance(got, frames.Answer) and got.call == number:
                return got.value
            elif isinstance(got, frames.Refusal) and got.call == number:
                raise (ChecksumError if got.damaged else EngineError)(got.text)
            elif got is None and left <= 0:
                what = type(frame).__name__.lower()
                option = " (`runtime.instance_seconds`)" if deadline_s is None else ""
                raise EngineError(f"the child process has not answered `{what}` for {within_s:g} s{option}")

    def close(self) -> None:
        """Kills the child with all that it started, and removes the folder. Safe to call twice."""
        if self._is_closed:  # its number may be that of another process by now
            return
        self._is_closed = True
        end_group(self._process.pid, lambda: self._process.poll() is not None)
        self._process.wait()
        self._pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _gone(self) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        how = "has closed its pipe" if code is None else f"ended with {_in_words(code)}"
        return EngineError(f"the child process {self._process.pid} {how}{self._last_lines()}")

    def _last_lines(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        kept = [line for line in lines if line.strip() and " WARNING " not in line][-NUM_LINES:]
        return "".join(f"\n  | {line}" for line in kept)


def _in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _scratch(options: frames.ChildOptions) -> Path | None:
    """Returns the folder to make the engine's folder in; None: the default.

    Files are in memory if there is room for them twice, because containers may have 64 MiB of it, and if they take a
    small part of the memory of the machine or of the container.
    """
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return None
    fits = 2 * options.file_bytes <= shutil.disk_usage(MEMORY_FOLDER).free
    return MEMORY_FOLDER if fits and options.file_bytes <= MEMORY_SHARE * usable_memory() else None


def _environment(options: frames.ChildOptions) -> dict[str, str]:
    """Returns the environment of the child: it imports what this process imports, and vLLM says only what is wrong."""
    own = dict(os.environ)
    own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    own["VLLM_LOGGING_LEVEL"] = "WARNING"
    own["VLLM_NO_USAGE_STATS"] = "1"
    own["TOKENIZERS_PARALLELISM"] = "false"
    if options.device == "cpu" and options.threads is not None:
        own["OMP_NUM_THREADS"] = str(options.threads)
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return own
