"""Runs a reward function that was given from Python in threads of this process, within `task.reward_seconds`.

Such a function cannot be imported by a worker process (`reward_pool.py`), so it shares this process with engine and
trainer: while it computes in Python, they wait for the interpreter. It has no sandbox, and sees everything.

- A thread cannot be killed. One whose call runs past the deadline is abandoned: its item fails with `LateRewardError`,
  another thread takes its place, and nothing waits for it, not even the end of the process.
- `MOST_ABANDONED` threads that hang at once are the limit. Until one of them returns, every further item fails at once.
- An `async def` reward runs on the event loop of one thread, many items at once, and is cancelled at its deadline. If
  it blocks that event loop, the thread is abandoned; its late items fail, and the others are scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from stretto.environments.function_specs import SpecError
from stretto.environments.reward_pipes import Result
from stretto.environments.reward_worker import Columns, Scorer, is_async, refuse_signature
from stretto.errors import LateRewardError, RecipeError, RewardError

MOST_ABANDONED = 64


@dataclass(slots=True, eq=False)
class _Item:
    identity: int
    prompt: str
    completion: str
    row: Mapping[str, Any]
    future: asyncio.Future[float]
    since: float | None = None  # when its call began


class _PlainThread:
    """Scores one item after the other, from a queue that all threads share."""

    def __init__(self, scorer: Scorer, items: SimpleQueue[_Item | None], done: Callable[[_Item, Result], None]) -> None:
        self.abandoned = False
        self.items: set[_Item] = set()  # the one that it scores
        self._scorer = scorer
        self._queue = items
        self._done = done
        self._process = os.getpid()
        self.thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.abandoned and (item := self._queue.get()) is not None:
            item.since = time.monotonic()
            self.items = {item}
            try:
                value = self._scorer.call(item.prompt, item.completion, item.row)
                result = self._scorer.check(item.identity, value)
            except BaseException as error:  # also `sys.exit()`: the reward fails, not the run
                result = self._scorer.failed(item.identity, error)
            if os.getpid() != self._process:  # a copy that the function forked: it would be a second driver
                os._exit(1)
            self.items = set()
            self._done(item, result)


class _AsyncThread:
    """Scores all items at once on an event loop of its own."""

    def __init__(self, scorer: Scorer, deadline_s: float, late: str, done: Callable[[_Item, Result], None]) -> None:
        self.abandoned = False
        self.items: set[_Item] = set()
        self._scorer = scorer
        self._deadline_s = deadline_s
        self._late = late
        self._done = done
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self.thread.start()

    def send(self, item: _Item) -> None:
        item.since = time.monotonic()
        self.items.add(item)
        self._loop.call_soon_threadsafe(self._begin, item)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(BaseException):
            self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(asyncio.sleep(0))

    def _begin(self, item: _Item) -> None:
        task = self._loop.create_task(self._score(item), name=f"reward {item.identity}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(self, item: _Item) -> None:
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                value = await self._scorer.call(item.prompt, item.completion, item.row)
            result = self._scorer.check(item.identity, value)
        except BaseException as error:
            expired = limit.expired() and isinstance(error, TimeoutError)
            result = (item.identity, None, self._late) if expired else self._scorer.failed(item.identity, error)
        self.items.discard(item)
        self._done(item, result)


class ThreadRewards:
    """Scores completions with a function of this process, a `def` or `async def`. `RewardPool` has the contract."""

    def __init__(
        self,
        name: str,
        reward: Callable[..., Any],
        *,
        threads: int = 1,
        deadline_s: float = 10.0,
        columns: Columns | None = None,
        most_abandoned: int = MOST_ABANDONED,
    ) -> None:
        """`name` stands in errors. `columns` are those of the rows, which `start` compares with the parameters."""
        self._name = name
        self._reward = reward
        self._num_threads = threads
        self._deadline_s = deadline_s
        self._columns = None if columns is None else dict(sorted(columns.items()))
        self._most_abandoned = most_abandoned
        self._scorer = Scorer(name, reward)
        self._late = f"`{name}` did not return within `task.reward_seconds = {deadline_s:g}`"
        self._ids = itertools.count()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._threads: list[_PlainThread | _AsyncThread] = []
        self._abandoned: list[threading.Thread] = []
        self._pending: set[_Item] = set()
        self._work = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def longest_s(self) -> float:
        """The longest that one item can occupy a thread, in seconds."""
        return self._deadline_s + max(1.0, self._deadline_s)

    @property
    def waiting(self) -> str:
        """Empty: a function does not say what it waits for."""
        return ""

    @property
    def num_abandoned(self) -> int:
        """Threads that were abandoned and still hang."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    async def start(self) -> None:
        """Starts the threads. Raises `RecipeError` if the function cannot be called with the columns of the rows."""
        if self._columns is not None:
            try:
                refuse_signature(self._name, self._reward, self._columns)
            except SpecError as error:
                raise RecipeError(f"`reward` cannot be used: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._threads = [self._new_thread() for _ in range(1 if is_async(self._reward) else self._num_threads)]
        self._watching = asyncio.create_task(self._watch(), name="reward deadlines")

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Returns the reward of one completion. Raises `RewardError`, which names the cause, if it has none."""
        if self._loop is None or self._watching is None:
            raise RewardError(f"`{self._name}` was asked for a reward while its threads were not running")
        item = _Item(next(self._ids), prompt, completion, row, self._loop.create_future())
        self._pending.add(item)
        self._work.set()
        self._send(item)
        try:
            return await item.future
        finally:
            self._pending.discard(item)

    async def close(self) -> None:
        """Ends the threads without waiting for them. Pending calls raise `RewardError`. Safe to call twice."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self._fail(self._pending, RewardError(f"`{self._name}` was stopped before it returned"))
        for thread in self._threads:
            thread.abandoned = True
            if isinstance(thread, _AsyncThread):
                thread.end()
            else:
                self._queue.put(None)
        self._threads.clear()

    def _new_thread(self) -> _PlainThread | _AsyncThread:
        if is_async(self._reward):
            return _AsyncThread(self._scorer, self._deadline_s, self._late, self._done)
        return _PlainThread(self._scorer, self._queue, self._done)

    def _send(self, item: _Item) -> None:
        if not self._threads:
            self._fail(
                [item],
                RewardError(f"{self.num_abandoned} calls of `{self._name}` hang in this process, which is the limit"),
            )
        elif isinstance(first := self._threads[0], _AsyncThread):
            first.send(item)
        else:
            self._queue.put(item)

    def _done(self, item: _Item, result: Result) -> None:
        """Takes a result, in the thread that has it. The run of an abandoned thread may be over."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, item, result)

    def _deliver(self, item: _Item, result: Result) -> None:
        _, value, error = result
        if item.future.done():
            return
        if value is None:
            item.future.set_exception((LateRewardError if error == self._late else RewardError)(str(error)))
        else:
            item.future.set_result(value)

    async def _watch(self) -> None:
        """Abandons threads that are stuck, and replaces them. Sleeps while nothing is to be scored."""
        while True:
            await self._work.wait()
            await asyncio.sleep(min(1.0, self._deadline_s / 10))
            for thread in list(self._threads):
                self._check(thread)
            while len(self._threads) < (1 if is_async(self._reward) else self._num_threads):
                if self.num_abandoned + len(self._threads) >= self._most_abandoned:
                    break  # those that work may hang too
                self._threads.append(self._new_thread())
            if not self._threads:
                self._fail(self._pending, RewardError(f"{self._late}, and {self.num_abandoned} such calls hang"))
            if not self._pending:
                self._work.clear()

    def _check(self, thread: _PlainThread | _AsyncThread) -> None:
        limit_s = self._deadline_s + (max(1.0, self._deadline_s) if isinstance(thread, _AsyncThread) else 0.0)
        now, items = time.monotonic(), set(thread.items)
        late = {item for item in items if item.since is not None and now - item.since > limit_s}
        if not late:
            return
        thread.abandoned = True
        self._threads.remove(thread)
        self._abandoned.append(thread.thread)
        self._fail(late, LateRewardError(self._late))
        if isinstance(thread, _AsyncThread):
            thread.end()
            again = [item for item in items - late if not item.future.done()]
            if again and self.num_abandoned < self._most_abandoned:
                self._threads.append(self._new_thread())
            for item in again:
                self._send(item)

    def _fail(self, items: set[_Item] | list[_Item], error: RewardError) -> None:
        for item in items:
            if not item.future.done():
                item.future.set_exception(error)
