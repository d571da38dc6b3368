"""The process that runs a reward function for `RewardPool`.

- It imports only the standard library and the user's module, so it starts fast.
- Frames (`reward_pipes.py`) arrive on standard input and leave on standard output. What the reward prints goes to
  standard error, which the pool reads.
- Before it scores an item, it marks the item in memory shared with the pool. So the pool knows which item hangs or has
  killed the process.
- A second thread waits on the input. When the pool's process ends, for whatever reason, the worker ends too.
- A process that the reward forks holds neither pipe. It exits where it would return from the reward function.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import mmap
import os
import pickle
import reprlib
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from queue import SimpleQueue
from typing import Any, BinaryIO, NoReturn

from stretto.environments.function_specs import SpecError, defined_at, last_line, resolve
from stretto.environments.reward_pipes import LENGTH, Item, Result, greeting_frame, results_frame
from stretto.environments.reward_range import BEYOND, is_trainable

MARK = struct.Struct("<dq")  # the time (`time.monotonic()`) since which this item is being scored
NOTHING = -1
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
    where = defined_at(reward)
    try:
        signature.bind("prompt", "completion", **dict.fromkeys(given))
    except TypeError as error:
        called = ", ".join(["prompt", "completion", *(f"{name}=..." for name in given)])
        have = f"rows have the columns {', '.join(columns)}" if columns else "rows have no other columns"
        raise SpecError(
            f"`def {name}{signature}`{where} cannot be called as `{name}({called})`: {error}; {have}; "
            f"write `def {name}(prompt, completion, **row)`"
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
        try:
            self._pipe.write(frame)
            self._pipe.flush()
        except BrokenPipeError:
            end()


def end() -> NoReturn:
    """Kills this process and those that the reward has started, because the pool is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_copy(owner: int, error: BaseException | None = None) -> None:
    """Exits if this is a process that the reward forked, which has returned from the reward or raised `error`.

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
    """Reads the next message. The pipe must be unbuffered: `select` does not see what a buffer holds."""
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


def main(mark_fd: int, sandbox: tuple[str, tuple[int, int, int], bool] | None = None) -> None:
    """Serves until the pool is gone.

    `sandbox` is None, or the folder and the limits of a sandbox to enter first, and True if it must hold in all parts.
    The first request is (spec, columns of the rows or None, deadline in seconds, error text of a late item). The reply
    is the greeting (`reward_pipes.py`).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    refusal = None if sandbox is None else _enter_sandbox(*sandbox)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb")
    keep_from_copies(requests, answers)
    outbox = Outbox(answers)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    memory = mmap.mmap(mark_fd, MARK.size)

    def mark(identity: int) -> None:
        MARK.pack_into(memory, 0, time.monotonic(), identity)

    owner = os.getpid()
    spec, columns, deadline_s, late = read_frame(requests)
    try:
        if refusal is not None:
            raise SpecError(refusal)
        reward = resolve(spec)
        end_copy(owner)
        if columns is not None:
            refuse_signature(spec, reward, columns)
    except SpecError as error:
        end_copy(owner, error)
        outbox.send(greeting_frame(str(error), False))
        sys.exit(0)
    asynchronous = is_async(reward)
    outbox.send(greeting_frame(None, asynchronous))
    scorer = Scorer(spec, reward)
    if asynchronous:
        asyncio.run(run_async(scorer, requests, outbox, mark, owner, deadline_s, late))
    else:
        run_plain(scorer, requests, outbox, mark, owner)


def _enter_sandbox(folder: str, limits: tuple[int, int, int], strict: bool) -> str | None:
    """Enters a sandbox. Returns why that is not enough, or None."""
    from stretto.environments.sandbox import Limits, enter, missing

    gaps = missing(enter(folder, Limits(*limits)))
    if not strict or not gaps:
        return None
    return f"`task.sandbox.strict = true`, and on this machine the sandbox has gaps: {'; '.join(gaps)}"
