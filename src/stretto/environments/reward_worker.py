"""The process that runs a reward function for `RewardPool`.

It imports the standard library and the user's module, nothing else, so that it starts in a moment. Frames of pickled
lists arrive on standard input and leave on standard output; whatever the reward itself prints goes to standard error,
which the pool reads.
Before it steps into an item it marks it in memory shared with the pool, so that the pool knows which one hangs or
killed the process. A second thread waits on the input: when the pool is gone, however it ended, so is the worker.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
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

LENGTH = struct.Struct("<Q")
MARK = struct.Struct("<dq")  # since when (`time.monotonic()`) which item is being stepped
NOTHING = -1
TICK_S = 0.05  # finished results wait no longer than this for their batch

Item = tuple[int, str, str, Mapping[str, Any]]  # id, prompt, completion, row
Result = tuple[int, float | None, str | None]  # id, reward or error
Reward = Callable[..., Any]
Columns = Mapping[str, str | None]  # the names of the columns of a task's rows -> a row that lacks it, where one does


class SpecError(Exception):
    """A `task.reward` that names no callable."""


def frame(message: Any) -> bytes:
    """A message as bytes on a pipe: its length, then its pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def resolve(spec: str) -> Reward:
    """The callable that `package.module:function` names."""
    module_name, _, path = spec.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            hint = f"; write `{module_name[:-3]}:{path}`, without `.py`" if module_name.endswith(".py") else ""
            raise SpecError(
                f"there is no module `{error.name}`, neither installed nor in the working directory {os.getcwd()}{hint}"
            ) from error
        raise SpecError(f"importing `{module_name}` failed: {last_line(error)}") from error
    except (Exception, SystemExit) as error:  # a module that is a program too may end it
        raise SpecError(f"importing `{module_name}` failed: {last_line(error)}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            near = difflib.get_close_matches(name, [n for n in dir(value) if not n.startswith("_")], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise SpecError(f"`{module_name}` has no `{path}`{hint}")
        value = getattr(value, name)
    if not callable(value):
        raise SpecError(f"`{path}` is {reprlib.repr(value)}, which cannot be called; name a function")
    result: Reward = value
    return result


def last_line(error: BaseException) -> str:
    """The last line of the traceback, and where it was raised; of what does not parse, where that is."""
    line = traceback.format_exception_only(error)[-1].strip()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):  # a file, no string
        places.append((error.filename, error.lineno))
    return f"{line} ({os.path.basename(places[-1][0])}:{places[-1][1]})" if places else line


def is_async(reward: Reward) -> bool:
    """Whether calling it gives a coroutine; sees through `functools.partial` and callable objects."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class Scorer:
    """Calls the reward with what it asks for, and turns what comes back into a finite number or a reason."""

    def __init__(self, spec: str, reward: Reward) -> None:
        self.spec = spec
        self._reward = reward
        self._columns = named_columns(reward)

    def call(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
        """What the function returns. Columns that it has no parameter for are left out."""
        if self._columns is not None:
            row = {name: value for name, value in row.items() if name in self._columns}
        return self._reward(prompt, completion, **row)

    def check(self, identity: int, value: Any) -> Result:
        """A number that is finite, or the reason why not."""
        if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            if inspect.iscoroutine(value):
                value.close()
            return self._refuse(identity, value)
        try:
            number = float(value)
        except Exception as error:
            return self.failed(identity, error)
        return (identity, number, None) if math.isfinite(number) else self._refuse(identity, value)

    def failed(self, identity: int, error: BaseException) -> Result:
        return identity, None, f"`{self.spec}` raised {last_line(error)}"

    def _refuse(self, identity: int, value: Any) -> Result:
        kind = type(value).__name__
        return identity, None, f"`{self.spec}` returned {reprlib.repr(value)} ({kind}); a reward is a finite number"


def named_columns(reward: Reward) -> frozenset[str] | None:
    """The columns that a function without `**row` has parameters for; None: it takes all of them."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def refuse_signature(spec: str, reward: Reward, columns: Columns) -> None:
    """Refuse a function that cannot be called with a prompt, a completion and rows of these columns."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a builtin that does not say
        return
    named = named_columns(reward)
    given = [name for name in columns if named is None or name in named]
    name = spec.partition(":")[2]
    code = getattr(inspect.unwrap(reward), "__code__", None)
    where = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
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
    """Results on their way back. Two threads flush it: the one that scores when a batch ends, the other every tick."""

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
                self.send(results)

    def send(self, message: Any) -> None:
        try:
            self._pipe.write(frame(message))
            self._pipe.flush()
        except BrokenPipeError:
            end()


def end() -> NoReturn:
    """Leave at once, with whatever processes the reward has started: nobody is left to hear an answer."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def read_frame(pipe: BinaryIO) -> Any:
    """The next message. The pipe is not buffered, because `select` would not see what a buffer holds."""
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
    """The second thread: hands batches in, and sends results that are ready while a slow item holds up their batch."""
    try:
        while True:
            while not select.select([pipe], [], [], TICK_S if outbox.expected > 0 else None)[0]:
                outbox.flush()
            items = read_frame(pipe)
            outbox.expect(len(items))
            deliver(items)
    except BaseException:  # a row that does not unpickle here; without this thread the worker would wait for ever
        traceback.print_exc()
        end()


def run_plain(scorer: Scorer, pipe: BinaryIO, outbox: Outbox, mark: Callable[[int], None]) -> None:
    """Score one item after the other. One that hangs is the pool's to notice: it kills this process."""
    batches: SimpleQueue[list[Item]] = SimpleQueue()
    threading.Thread(target=receive, args=(pipe, outbox, batches.put), name="receive", daemon=True).start()
    while True:
        for identity, prompt, completion, row in batches.get():
            mark(identity)
            try:
                result = scorer.check(identity, scorer.call(prompt, completion, row))
            except BaseException as error:  # `sys.exit()` in a reward is a failure of that reward
                result = scorer.failed(identity, error)
            outbox.add(result)
        mark(NOTHING)
        outbox.flush()


async def run_async(
    scorer: Scorer, pipe: BinaryIO, outbox: Outbox, mark: Callable[[int], None], deadline_s: float, late: str
) -> None:
    """Score all items at once, each with its own deadline."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def score(item: Item) -> None:
        identity, prompt, completion, row = item
        try:
            async with asyncio.timeout(deadline_s) as limit:
                value = await marked(
                    scorer.call(prompt, completion, row), lambda: mark(identity), lambda: mark(NOTHING)
                )
            outbox.add(scorer.check(identity, value))
        except BaseException as error:
            expired = limit.expired() and isinstance(error, TimeoutError)
            outbox.add((identity, None, late) if expired else scorer.failed(identity, error))
        loop.call_soon(outbox.flush)  # one frame for all that finished in this turn of the loop

    def begin(items: list[Item]) -> None:
        for item in items:
            task = loop.create_task(score(item), name=f"reward {item[0]}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def deliver(items: list[Item]) -> None:
        loop.call_soon_threadsafe(begin, items)

    threading.Thread(target=receive, args=(pipe, outbox, deliver), name="receive", daemon=True).start()
    await asyncio.Event().wait()  # until the pool is gone


@types.coroutine
def marked(awaitable: Awaitable[Any], enter: Callable[[], None], leave: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await it with every step between `enter` and `leave`: one that blocks the event loop is known by its mark."""
    steps = awaitable.__await__()
    error: BaseException | None = None
    while True:
        enter()
        try:
            waiting = next(steps) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            leave()
        error = None
        try:
            yield waiting
        except BaseException as raised:  # a cancellation, most likely: the step's to see
            error = raised


def main(mark_fd: int) -> None:
    """Serve until the pool is gone.

    The first frame is (spec, columns of the rows or None, deadline in seconds, what to say of a late one); the answer
    is (error, is async).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    outbox = Outbox(os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    memory = mmap.mmap(mark_fd, MARK.size)

    def mark(identity: int) -> None:
        MARK.pack_into(memory, 0, time.monotonic(), identity)

    spec, columns, deadline_s, late = read_frame(requests)
    try:
        reward = resolve(spec)
        if columns is not None:
            refuse_signature(spec, reward, columns)
    except SpecError as error:
        outbox.send((str(error), False))
        sys.exit(0)
    asynchronous = is_async(reward)
    outbox.send((None, asynchronous))
    scorer = Scorer(spec, reward)
    if asynchronous:
        asyncio.run(run_async(scorer, requests, outbox, mark, deadline_s, late))
    else:
        run_plain(scorer, requests, outbox, mark)
