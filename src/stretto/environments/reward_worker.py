"""The process that runs a reward function for `RewardPool`.

- It imports only the standard library and the user's module, so it starts fast. `worker_child.py` has its pipes.
- Before it scores an item, it marks the item in memory shared with the pool. So the pool knows which item hangs or has
  killed the process.
- A second thread waits on the input. When the pool's process ends, for whatever reason, the worker ends too.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import select
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import BinaryIO

from stretto.environments.function_specs import SpecError
from stretto.environments.reward_pipes import Greeting, Item, Result, results_frame, reward_greeting_frame
from stretto.environments.reward_scoring import AsyncScoring, PlainScoring, make_calls
from stretto.environments.worker_child import (
    SandboxArguments,
    end,
    end_copy,
    open_pipes,
    read_frame,
    send,
)

MARK = struct.Struct("<dq")  # the time (`time.monotonic()`) since which this item is being scored
NOTHING = -1
NOTE = struct.Struct("<H510s")  # length and text of a sentence on what scoring waits for; behind the mark
TICK_S = 0.05  # finished results wait no longer than this for their batch


class Outbox:
    """Collects results and sends them. The scoring thread flushes it after a batch, the receiving one every tick."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._results: deque[Result] = deque()
        self._lock = threading.Lock()
        self.expected = 0  # results still to be sent

    def expect(self, num_items: int) -> None:
        with self._lock:
            self.expected += num_items

    def add(self, result: Result) -> None:
        self._results.append(result)

    def flush(self) -> None:
        with self._lock:
            results = [self._results.popleft() for _ in range(len(self._results))]
            if results:
                self.expected -= len(results)
                self.send(results_frame(results))

    def send(self, frame: bytes) -> None:
        send(self._pipe, frame)


def receive(pipe: BinaryIO, outbox: Outbox, deliver: Callable[[list[Item]], None]) -> None:
    """Runs in the second thread: delivers batches, and sends finished results while a slow item delays its batch."""
    try:
        while True:
            while not select.select([pipe], [], [], TICK_S if outbox.expected > 0 else None)[0]:
                outbox.flush()
            items = read_frame(pipe)
            outbox.expect(len(items))
            deliver(items)
    except BaseException:  # for example a row that cannot be unpickled; without this thread the worker would hang
        traceback.print_exc()
        end()


def run_plain(scoring: PlainScoring, pipe: BinaryIO, outbox: Outbox, mark: Callable[[int], None]) -> None:
    """Scores one batch after the other. If a call hangs, the pool kills this process."""
    batches: SimpleQueue[list[Item]] = SimpleQueue()
    threading.Thread(target=receive, args=(pipe, outbox, batches.put), name="receive", daemon=True).start()
    while True:
        scoring.score(batches.get())
        mark(NOTHING)
        outbox.flush()


async def run_async(scoring: AsyncScoring, pipe: BinaryIO, outbox: Outbox) -> None:
    """Scores all items concurrently."""
    loop = asyncio.get_running_loop()

    def deliver(items: list[Item]) -> None:
        loop.call_soon_threadsafe(scoring.begin, items)

    threading.Thread(target=receive, args=(pipe, outbox, deliver), name="receive", daemon=True).start()
    await asyncio.Event().wait()  # the receiving thread ends the process


def read_note(memory: mmap.mmap) -> str:
    """Returns the sentence on what the scorer of a worker waits for; empty if it waits for nothing."""
    size, data = NOTE.unpack_from(memory, MARK.size)
    return bytes(data[:size]).decode("utf-8", "replace")


def main(mark_fd: int, sandbox: SandboxArguments | None = None) -> None:
    """Serves until the pool is gone.

    `sandbox` is None, or the folder and the limits of a sandbox to enter first, and True if it must hold in all parts.
    The first request is (specs, columns of the rows or None, deadline in seconds). The reply is the greeting
    (`reward_pipes.py`).
    """
    requests, answers, refusal = open_pipes(sandbox)
    outbox = Outbox(answers)
    memory = mmap.mmap(mark_fd, MARK.size + NOTE.size)

    def mark(identity: int) -> None:
        MARK.pack_into(memory, 0, time.monotonic(), identity)

    def note(text: str) -> None:
        data = text.encode("utf-8", "replace")[: NOTE.size - 2]
        NOTE.pack_into(memory, MARK.size, len(data), data)

    owner = os.getpid()
    specs, columns, deadline_s = read_frame(requests)
    try:
        if refusal is not None:
            raise SpecError(refusal)
        calls = make_calls(specs, columns, note=note)
        end_copy(owner)
    except SpecError as error:
        end_copy(owner, error)
        outbox.send(reward_greeting_frame(Greeting(str(error))))
        sys.exit(0)
    asynchronous = any(call.asynchronous for call in calls)
    batched, wants = any(call.batched for call in calls), 0
    for call in calls:
        wants |= call.wants
    outbox.send(reward_greeting_frame(Greeting(None, asynchronous, batched, wants, tuple(call.form for call in calls))))

    def left(error: BaseException | None) -> None:
        end_copy(owner, error)

    if not asynchronous:
        run_plain(PlainScoring(calls, mark=mark, left=left, done=outbox.add), requests, outbox, mark)

    def left_step(error: BaseException | None) -> None:
        end_copy(owner, error)
        mark(NOTHING)

    def done(result: Result) -> None:
        outbox.add(result)
        asyncio.get_running_loop().call_soon(outbox.flush)  # one frame for all that finish in this turn of the loop

    scoring = AsyncScoring(calls, deadline_s=deadline_s, mark=mark, left=left_step, done=done)
    asyncio.run(run_async(scoring, requests, outbox))
