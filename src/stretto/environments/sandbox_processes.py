"""Runs commands in a sandbox (`sandbox.py`): for tools of an environment that run code written by the model.

    result = await run_in_sandbox([sys.executable, "-c", code], seconds=5.0)
    if result.code == 0:
        ...

The command sees no network, no secret variable, and a folder of its own that is empty and removed after it. At the
deadline it is killed with every process that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stretto.environments import sandbox
from stretto.environments.reward_environment import worker_environment
from stretto.environments.sandbox import Limits
from stretto.errors import RewardError

DEFAULT_LIMITS = Limits(memory=4 << 30, disk=64 << 20, processes=64)
PROBE_S = 60.0
EXIT_S = 10.0  # for a killed command to exit


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a command."""

    code: int | None  # its exit code, negative for a signal; None: it was killed at the deadline
    output: str  # what it printed, standard error included; cut to `output_bytes`


async def run_in_sandbox(
    command: Sequence[str],
    *,
    input_text: str = "",
    seconds: float = 10.0,
    limits: Limits = DEFAULT_LIMITS,
    strict: bool = True,
    output_bytes: int = 100_000,
) -> SandboxResult:
    """Runs a command in a sandbox of its own and returns what it printed.

    If `strict`, raises `RewardError` on a machine where a part of the sandbox does not hold.
    """
    if strict and (gaps := sandbox.missing(await asyncio.to_thread(held_parts, limits))):
        raise RewardError(f"the sandbox has gaps on this machine: {'; '.join(gaps)}; `strict=False` accepts them")
    with sandbox_folder() as folder:
        process = await asyncio.create_subprocess_exec(
            *sandboxed(folder, limits),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=worker_environment({}, folder),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output = bytearray()
        code: int | None = None
        try:
            async with asyncio.timeout(seconds):
                feeding = asyncio.create_task(_feed(process.stdin, input_text), name="input of a sandbox")
                try:
                    while piece := await process.stdout.read(1 << 16):
                        output += piece[: max(0, output_bytes - len(output))]
                    code = await process.wait()
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # a process that has left the group may keep the pipe open
                await asyncio.wait_for(process.wait(), EXIT_S)
    return SandboxResult(code, output.decode("utf-8", errors="replace"))


async def _feed(pipe: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # a command may end without having read its input
        pipe.write(text.encode("utf-8", errors="replace"))
        await pipe.drain()
        pipe.close()


@lru_cache(maxsize=8)
def held_parts(limits: Limits = DEFAULT_LIMITS) -> frozenset[str]:
    """Returns the parts of a sandbox that hold on this machine. Tries them in a process, once."""
    with sandbox_folder() as folder:
        done = subprocess.run(
            sandboxed(folder, limits),
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            env=worker_environment({}, folder),
        )
    return frozenset(done.stdout.splitlines()) if done.returncode == 0 else frozenset()


def sandboxed(folder: str, limits: Limits, **options: Any) -> list[str]:
    """The beginning of a command that enters a sandbox; the command to run in it follows. `options` are of `enter`.

    This process's modules stay readable, also if they lie in the home folder.
    """
    kept = [sys.prefix, sys.base_prefix, *filter(None, sys.path), *options.pop("kept", ())]
    return [sys.executable, "-I", "-S", sandbox.__file__, *sandbox.arguments(folder, limits, kept=kept, **options)]


@contextlib.contextmanager
def sandbox_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="stretto-sandbox-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
