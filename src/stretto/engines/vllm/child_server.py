"""The child's side of the pipe: serves calls and requests of the engine from a backend.

A thread reads the pipe, so that the engine never waits for the child to read. Everything else runs in one event loop.
The new tokens of all requests that came in one round of that loop leave in one frame. When the pipe ends, the engine is
gone: the child ends then, with everything that it started, also if the backend blocks the loop, as vLLM does while it
starts. If the child itself is killed, its guard ends what it started (`process_group.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from stretto.engines.vllm import frames
from stretto.engines.vllm.process_group import END_S, end_group, leads_group, start_guard
from stretto.engines.vllm.weight_folders import checksum_of_folder
from stretto.errors import ChecksumError, describe

ABORT_S = 30.0  # for an aborted request to end
BLOCKED_S = 2 * END_S  # for the loop to notice the end of the pipe, and the child to end
AGAIN_S = 0.1  # until it is aborted again

Call = frames.Start | frames.Load | frames.Unload | frames.Abort


class Backend(Protocol):
    """The engine in the child. One event loop calls everything."""

    async def start(self, options: frames.ChildOptions) -> frames.Ready:
        """Makes the engine."""
        ...

    async def load_adapter(self, number: int, folder: Path) -> None:
        """Loads an adapter beside those that are there."""
        ...

    async def remove_adapter(self, number: int) -> None:
        """Removes an adapter that no request uses."""
        ...

    async def reload(self, number: int, folder: Path) -> None:
        """Replaces all weights by those of load `number`. No request runs meanwhile."""
        ...

    async def score(self, tokens: Sequence[int], number: int) -> list[float]:
        """Returns the log-probability of each token after the first, at temperature 1."""
        ...

    async def held(self) -> str | None:
        """Returns a digest of the weights that the engine holds, by checksums of its own; None if it has none.

        Adapters are not among them: with adapters it is that of the base.
        """
        ...

    def generate(self, work: frames.Generate) -> AsyncIterator[frames.Piece]:
        """Generates one request to its end; if it is aborted, to the last token that it has then."""
        ...

    async def abort(self, keys: Sequence[int]) -> None:
        """Has requests end soon."""
        ...

    def failure(self) -> str:
        """Returns why the engine is dead; empty if it is not."""
        ...


def run_child(backend: Backend, arguments: Sequence[str]) -> None:
    """Serves the engine at the other end of a pipe until that ends. Does not return: the process group is killed.

    `arguments` are those of the command line: the descriptor of the pipe, and the folder that engine and child share.
    """
    connection, folder = Connection(int(arguments[1])), arguments[2]

    def kill() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # Processes that the backend has started would outlive this one, and hold their memory.
        if leads_group():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    start_guard(folder)
    try:
        asyncio.run(ChildServer(backend, connection, kill).serve())
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # an engine that was killed has not done so
        if leads_group():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_group(os.getpid())
        kill()


class ChildServer:
    """Serves one engine."""

    def __init__(self, backend: Backend, connection: Connection, kill: Callable[[], None]) -> None:
        """`kill` ends the child at once. It is called if `serve` does not return after the end of the pipe."""
        self._backend = backend
        self._connection = connection
        self._kill = kill
        self._kinds: dict[int, frames.WeightsKind] = {}  # of the loads that are resident
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._numbers: dict[int, int] = {}  # of the loads that they are generated under
        self._aborted: set[int] = set()  # those that the engine wants no end of
        self._calls: set[asyncio.Task[None]] = set()
        self._outbox: list[frames.Piece] = []
        self._dead = asyncio.Event()

    async def serve(self) -> None:
        """Returns when the pipe has ended, or the backend is dead and has said so."""
        loop = asyncio.get_running_loop()
        incoming: asyncio.Queue[frames.ToChild | None] = asyncio.Queue()

        def read() -> None:
            while True:
                try:
                    frame = self._connection.recv()
                except (EOFError, OSError):
                    frame = None
                loop.call_soon_threadsafe(incoming.put_nowait, frame)
                if frame is None:
                    time.sleep(BLOCKED_S)
                    self._kill()
                    return

        threading.Thread(target=read, name="pipe", daemon=True).start()
        dead = asyncio.create_task(self._dead.wait(), name="death of the engine")
        while True:
            next_frame = asyncio.create_task(incoming.get(), name="next frame")
            await asyncio.wait({next_frame, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not next_frame.done():
                return
            frame = next_frame.result()
            if frame is None:
                return
            self._take(frame)

    def _take(self, frame: frames.ToChild) -> None:
        if isinstance(frame, frames.Generate):
            task = asyncio.create_task(self._generate(frame), name=f"request {frame.key}")
            self._requests[frame.key], self._numbers[frame.key] = task, frame.number
            task.add_done_callback(lambda _: self._forget(frame.key))
            return
        call = asyncio.create_task(self._answer(frame), name=f"call {frame.call}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _forget(self, key: int) -> None:
        del self._requests[key], self._numbers[key]
        self._aborted.discard(key)

    async def _answer(self, frame: Call) -> None:
        try:
            value = await self._apply(frame)
        except Exception as error:
            # A child that was refused what it started with has nothing to continue with: the engine ends it.
            self._flush()
            self._send(frames.Refusal(frame.call, describe(error), isinstance(error, ChecksumError)))
            self._say_if_dead()
            return
        self._flush()  # the pipe keeps the order: what was sampled before goes before
        self._send(frames.Answer(frame.call, value))

    async def _apply(self, frame: Call) -> frames.Ready | frames.Loaded | None:
        if isinstance(frame, frames.Start):
            return await self._backend.start(frame.options)
        if isinstance(frame, frames.Load):
            return await self._load(frame)
        if isinstance(frame, frames.Unload):
            await self._unload(frame.number)
        else:
            await self._abort(frame.keys)
        return None

    async def _load(self, frame: frames.Load) -> frames.Loaded:
        folder, began = Path(frame.folder), time.perf_counter()
        found = await asyncio.to_thread(checksum_of_folder, folder, frame.kind)
        read_s = time.perf_counter() - began
        if found != frame.checksum:
            raise ChecksumError(f"the file of the weights has checksum `{found}`, expected `{frame.checksum}`")
        try:
            if frame.kind == "full":
                await self._ended(list(self._requests))
            began = time.perf_counter()
            if frame.kind == "full":
                await self._backend.reload(frame.number, folder)
            else:
                await self._backend.load_adapter(frame.number, folder)
        except Exception as error:
            raise ChecksumError(f"vLLM cannot load the weights: {describe(error)}") from error
        self._kinds[frame.number], loaded = frame.kind, time.perf_counter()
        try:
            answer = tuple(await self._backend.score(frame.probe, frame.number))
            took = {"read_s": read_s, "load_s": loaded - began, "probe_s": time.perf_counter() - loaded}
            return frames.Loaded(found, answer, await self._backend.held(), **took)
        except BaseException:
            await self._unload(frame.number)
            raise

    async def _unload(self, number: int) -> None:
        """Unloads a version after the last of its requests, which may have been aborted a moment ago."""
        await self._ended([key for key, own in self._numbers.items() if own == number])
        if self._kinds.pop(number, None) == "lora":
            await self._backend.remove_adapter(number)

    async def _abort(self, keys: Sequence[int]) -> None:
        """Aborts requests until they have ended: one that is just being handed to the backend is not known there."""
        deadline = asyncio.get_running_loop().time() + ABORT_S
        self._aborted.update(key for key in keys if key in self._requests)
        while here := [key for key in keys if key in self._requests]:
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"{len(here)} requests do not end within {ABORT_S:g} s")
            await self._backend.abort(here)
            if ending := {self._requests[key] for key in here if key in self._requests}:
                await asyncio.wait(ending, timeout=AGAIN_S)
            await asyncio.sleep(0)  # those that have ended are forgotten in the next round

    async def _ended(self, keys: Sequence[int]) -> None:
        """Waits for requests to end. Raises `RuntimeError` if they do not."""
        ending = {self._requests[key] for key in keys if key in self._requests}
        if ending and (await asyncio.wait(ending, timeout=ABORT_S))[1]:
            raise RuntimeError(f"requests do not end within {ABORT_S:g} s")

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _generate(self, work: frames.Generate) -> None:
        has_ended = False
        try:
            async for piece in self._backend.generate(work):
                self._put(piece)
                has_ended = has_ended or piece.finish is not None
            if not has_ended and work.key not in self._aborted:  # the engine would wait for its end for ever
                raise RuntimeError("the backend has ended it without a reason")
        except Exception as error:
            if not self._say_if_dead():
                self._put(frames.Piece(work.key, (), (), "error", error=describe(error)))

    def _put(self, piece: frames.Piece) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(piece)

    def _flush(self) -> None:
        if self._outbox:
            pieces, self._outbox = self._outbox, []
            self._send(frames.Tokens(tuple(pieces)))

    def _send(self, frame: frames.FromChild) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, and the reader is about to say so
            self._connection.send(frame)

    def _say_if_dead(self) -> bool:
        """Tells the engine if the backend is dead, and ends the child then."""
        reason = self._backend.failure()
        if reason:
            self._flush()
            self._send(frames.Failure(reason))
            self._dead.set()
        return bool(reason)
