"""The process that runs a reward function for `RewardPool`.

- It imports only the standard library and the user's module, so it starts fast. `worker_child.py` has its pipes.
- Before it scores an item, it marks the item in memory shared with the pool. So the pool knows which item hangs or has
  killed the process.
- A second thread waits on the input. When the pool's process ends, for whatever reason, the worker ends too.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import mmap
import os
import reprlib
import select
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, BinaryIO

from stretto.environments.built_scorers import BuiltScorer
from stretto.environments.function_specs import SpecError, defined_at, last_line, resolve
from stretto.environments.reward_pipes import HALT, Item, Result, greeting_frame, results_frame
from stretto.environments.reward_range import BEYOND, is_trainable
from stretto.environments.scoring_errors import HaltError, ScoringError
from stretto.environments.worker_child import (
    SandboxArguments,
    end,
    end_copy,
    marked,
    open_pipes,
    read_frame,
    send,
)

MARK = struct.Struct("<dq")  # the time (`time.monotonic()`) since which this item is being scored
NOTHING = -1
NOTE = struct.Struct("<H510s")  # length and text of a sentence on what scoring waits for; behind the mark
NOT_FINITE = "; a reward is a finite number"
TICK_S = 0.05  # finished results wait no longer than this for their batch

Reward = Callable[..., Any]
Columns = Mapping[str, str | None]  # each column of a task's rows -> a row that lacks it; None: all rows have it


def is_async(reward: Reward) -> bool:
    """Tells if calling it returns a coroutine. Works for `functools.partial` and callable objects too."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class Scorer:
    """Calls the reward function and turns what it returns into a result: a reward or an error text."""

    def __init__(self, spec: str, reward: Reward) -> None:
        self.spec = spec
        self._reward = reward
        self._columns = named_columns(reward)

    def call(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
        """Calls the function, without the columns that it has no parameter for, and returns what it returns."""
        if self._columns is not None:
            row = {name: value for name, value in row.items() if name in self._columns}
        return self._reward(prompt, completion, **row)

    def check(self, identity: int, value: Any) -> Result:
        """Returns the result for a returned value: the value as a number, or why it is not a reward."""
        if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            if inspect.iscoroutine(value):
                value.close()
            return self._refuse(identity, value)
        try:
            number = float(value)
        except Exception as error:
            return self.failed(identity, error)
        if is_trainable(number):
            return identity, number, None
        return self._refuse(identity, value, f", {BEYOND}" if math.isfinite(number) else NOT_FINITE)

    def failed(self, identity: int, error: BaseException) -> Result:
        if isinstance(error, HaltError):
            return identity, None, f"{HALT}{error}"
        if isinstance(error, ScoringError):
            return identity, None, str(error)
        return identity, None, f"`{self.spec}` raised {last_line(error)}"

    def _refuse(self, identity: int, value: Any, why: str = NOT_FINITE) -> Result:
        return identity, None, f"`{self.spec}` returned {reprlib.repr(value)} ({type(value).__name__}){why}"


def named_columns(reward: Reward) -> frozenset[str] | None:
    """Returns the parameters of a function without `**row`; None if the function takes all columns."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def refuse_signature(spec: str, reward: Reward, columns: Columns) -> None:
    """Raises `SpecError` if a function cannot be called with a prompt, a completion and rows of these columns."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    named = named_columns(reward)
    given = [name for name in columns if named is None or name in named]
    name = spec.partition(":")[2]
    written = name if name.isidentifier() else "reward"  # a lambda has no name
    where = defined_at(reward)
    try:
        signature.bind("prompt", "completion", **dict.fromkeys(given))
    except TypeError as error:
        called = ", ".join(["prompt", "completion", *(f"{name}=..." for name in given)])
        have = f"rows have the columns {', '.join(columns)}" if columns else "rows have no other columns"
        raise SpecError(
            f"`def {name}{signature}`{where} cannot be called as `{name}({called})`: {error}; {have}; "
            f"write `def {written}(prompt, completion, **row)`"
        ) from error
    for column in given:
        if (lacking := columns[column]) is not None:
            try:
                signature.bind("prompt", "completion", **dict.fromkeys(other for other in given if other != column))
            except TypeError as error:
                raise SpecError(
                    f"`def {name}{signature}`{where} takes the column `{column}`, which {lacking} does not "
                    "have; add it to that row, or give the parameter a default"
                ) from error


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


def run_plain(scorer: Scorer, pipe: BinaryIO, outbox: Outbox, mark: Callable[[int], None], owner: int) -> None:
    """Scores one item after the other. If an item hangs, the pool kills this process."""
    batches: SimpleQueue[list[Item]] = SimpleQueue()
    threading.Thread(target=receive, args=(pipe, outbox, batches.put), name="receive", daemon=True).start()
    while True:
        for identity, prompt, completion, row in batches.get():
            mark(identity)
            try:
                result = scorer.check(identity, scorer.call(prompt, completion, row))
            except BaseException as error:  # also `sys.exit()`: the reward fails, not the worker
                end_copy(owner, error)
                result = scorer.failed(identity, error)
            end_copy(owner)
            outbox.add(result)
        mark(NOTHING)
        outbox.flush()


async def run_async(
    scorer: Scorer,
    pipe: BinaryIO,
    outbox: Outbox,
    mark: Callable[[int], None],
    owner: int,
    deadline_s: float,
    late: str,
) -> None:
    """Scores all items concurrently, each with its own deadline."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def leave(error: BaseException | None) -> None:
        end_copy(owner, error)
        mark(NOTHING)

    async def score(item: Item) -> None:
        identity, prompt, completion, row = item
        try:
            async with asyncio.timeout(deadline_s) as limit:
                value = await marked(scorer.call(prompt, completion, row), lambda: mark(identity), leave)
            outbox.add(scorer.check(identity, value))
        except BaseException as error:
            expired = limit.expired() and isinstance(error, TimeoutError)
            outbox.add((identity, None, late) if expired else scorer.failed(identity, error))
        loop.call_soon(outbox.flush)  # one frame for all items that finished in this turn of the event loop

    def begin(items: list[Item]) -> None:
        for item in items:
            task = loop.create_task(score(item), name=f"reward {item[0]}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def deliver(items: list[Item]) -> None:
        loop.call_soon_threadsafe(begin, items)

    threading.Thread(target=receive, args=(pipe, outbox, deliver), name="receive", daemon=True).start()
    await asyncio.Event().wait()  # the receiving thread ends the process


def build(make: Reward, built: BuiltScorer, columns: Columns | None, note: Callable[[str], None]) -> Reward:
    """Makes a scorer from its options. Raises `SpecError` if that fails."""
    try:
        made: Reward = make(**built.arguments, columns=columns, note=note, option=built.option)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(last_line(error)) from error
    return made


def read_note(memory: mmap.mmap) -> str:
    """Returns the sentence on what the scorer of a worker waits for; empty if it waits for nothing."""
    size, data = NOTE.unpack_from(memory, MARK.size)
    return bytes(data[:size]).decode("utf-8", "replace")


def main(mark_fd: int, sandbox: SandboxArguments | None = None) -> None:
    """Serves until the pool is gone.

    `sandbox` is None, or the folder and the limits of a sandbox to enter first, and True if it must hold in all parts.
    The first request is (spec, columns of the rows or None, deadline in seconds, error text of a late item, the
    `BuiltScorer` that `spec` is called for or None). The reply is the greeting (`reward_pipes.py`).
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
    spec, columns, deadline_s, late, built = read_frame(requests)
    try:
        if refusal is not None:
            raise SpecError(refusal)
        reward = resolve(spec)
        if built is not None:
            reward = build(reward, built, columns, note)
        end_copy(owner)
        if columns is not None and built is None:
            refuse_signature(spec, reward, columns)
    except SpecError as error:
        end_copy(owner, error)
        outbox.send(greeting_frame(str(error), False))
        sys.exit(0)
    asynchronous = is_async(reward)
    outbox.send(greeting_frame(None, asynchronous))
    scorer = Scorer(spec if built is None else built.option, reward)
    if asynchronous:
        asyncio.run(run_async(scorer, requests, outbox, mark, owner, deadline_s, late))
    else:
        run_plain(scorer, requests, outbox, mark, owner)
