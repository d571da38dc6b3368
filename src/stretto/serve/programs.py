"""Runs one program to its end: input, bounded output, and no process left behind.

The program has a process group of its own. When it ends, or when the caller is cancelled, all processes of the group
are killed. A process that leaves the group escapes this; with a sandbox none can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import RewardError

OUTPUT_BYTES = 1 << 20  # of its output that are kept: the last ones
DRAIN_S = 5.0  # for output to arrive after the program has ended; a process that left the group may keep a pipe open


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The end of a program."""

    status: int  # exit status, negative for a signal
    output: str
    errors: str  # standard error

    @property
    def last_words(self) -> str:
        """The end of what it printed, for a message: of its errors, or of its output if there are none."""
        said = (self.errors.strip() or self.output.strip())[-400:].strip()
        return f"; its output ends: {said}" if said else "; it printed nothing"


async def run_program(
    command: Sequence[str], *, environment: Mapping[str, str], input_text: str, output_bytes: int = OUTPUT_BYTES
) -> ProgramResult:
    """Runs a program. Raises `RewardError` if it cannot be started. If cancelled, kills it with its children."""
    loop = asyncio.get_running_loop()
    try:
        transport, running = await loop.subprocess_exec(
            lambda: _Running(output_bytes), *command, start_new_session=True, env=dict(environment)
        )
    except OSError as error:
        raise RewardError(f"the program `{command[0]}` cannot be started: {error.strerror or error}") from error
    group = transport.get_pid()
    try:
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(input_text.encode("utf-8", errors="replace"))  # a program need not read it
        pipe.write_eof()
        await running.exited.wait()
        _kill(group)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.silent.wait(), DRAIN_S)
    finally:
        if not running.exited.is_set():
            _kill(group)
            await running.exited.wait()
        transport.close()
    status = transport.get_returncode()
    assert status is not None
    output, errors = (bytes(kept[-output_bytes:]).decode("utf-8", errors="replace") for kept in running.kept.values())
    return ProgramResult(status, output, errors)


class _Running(asyncio.SubprocessProtocol):
    """A program in progress. Its exit is noticed also while another process holds its pipes."""

    def __init__(self, output_bytes: int) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()  # nobody writes to its pipes any more
        self._most = output_bytes
        self._open = set(self.kept)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        kept = self.kept[fd]
        kept += data
        if len(kept) > 2 * self._most:
            del kept[: -self._most]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.silent.set()

    def process_exited(self) -> None:
        self.exited.set()


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
