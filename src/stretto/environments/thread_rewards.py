"""Runs a reward function that was given from Python in threads of this process, within `task.reward_seconds`.

Such a function cannot be imported by a worker process (`reward_pool.py`), so it shares this process with engine and
trainer: while it computes in Python, they wait for the interpreter. It has no sandbox, and sees everything.

- A thread cannot be killed. One whose call runs past the deadline is abandoned: its item fails with `LateRewardError`,
  another thread takes its place, and nothing waits for it, not even the end of the process.
- `MOST_ABANDONED` threads that hang at once are the limit. Until one of them returns, every further item fails at once.
- An `async def` reward runs on the event loop of one thread, many items at once, and is cancelled at its deadline. If
  it blocks that event loop, the thread is abandoned; its late items fail, and the others are scored again.
- A batched reward gets all items that wait. If that call is late, each of them is scored alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from stretto.environments.function_specs import SpecError
from stretto.environments.grades import Grade, graded
from stretto.environments.reward_calls import (
    Columns,
    Details,
    RewardCall,
    RewardSpec,
    as_specs,
    late_text,
    refuse_specs,
    refuse_weightless,
)
from stretto.environments.reward_pipes import Item, Result, Scores
from stretto.environments.reward_pool import longest_reward_s
from stretto.environments.reward_scoring import AsyncScoring, PlainScoring, make_calls
from stretto.errors import LateRewardError, RecipeError, RewardError

MOST_ABANDONED = 64


@dataclass(slots=True, eq=False)
class _Asked:
    """A completion without a result."""

    item: Item
    future: asyncio.Future[Scores]
    since: float = 0.0  # when an event loop took it up
    alone: bool = False  # a batch that it was in was late: it is scored alone


class _PlainThread:
    """Scores from a queue that all threads share: one after the other, or all that wait if a reward is batched."""

    def __init__(
        self,
        calls: Sequence[RewardCall],
        queue: SimpleQueue[list[_Asked] | None],
        done: Callable[[_Asked, Result], None],
    ) -> None:
        self.abandoned = False
        self.asked: dict[int, _Asked] = {}  # those that it scores, by id
        self._calling: tuple[float, tuple[_Asked, ...]] = (0.0, ())  # since when, and those that the call is for
        self._most = max((call.batch_size for call in calls if call.batched), default=1)
        self._scoring = PlainScoring(calls, mark=self._began, left=self._left, done=self._ended)
        self._queue = queue
        self._done = done
        self._process = os.getpid()
        self.thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.abandoned and (some := self._queue.get()) is not None:
            while not some[0].alone and len(some) < self._most:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                if more is None or more[0].alone:
                    self._queue.put(more)  # the end of another thread, or for a call of its own
                    break
                some = [*some, *more]
            self.asked = {each.item[0]: each for each in some}
            self._scoring.score([each.item for each in some])
            self._calling, self.asked = (0.0, ()), {}

    def late(self, now: float, limit_s: float) -> list[_Asked]:
        """Returns those whose call has taken longer than the limit."""
        since, called = self._calling
        return list(called) if now - since > limit_s else []

    def _began(self, identity: int) -> None:
        """Notes that a call begins: of one completion, or of several."""
        asked = self.asked
        self._calling = time.monotonic(), (asked[identity],) if identity in asked else tuple(asked.values())

    def _left(self, error: BaseException | None) -> None:
        if os.getpid() != self._process:  # a copy that the function forked: it would be a second driver
            os._exit(1)

    def _ended(self, result: Result) -> None:
        self._done(self.asked[result[0]], result)


class _AsyncThread:
    """Scores all that has arrived at once, on an event loop of its own."""

    def __init__(self, calls: Sequence[RewardCall], deadline_s: float, done: Callable[[_Asked, Result], None]) -> None:
        self.abandoned = False
        self.asked: dict[int, _Asked] = {}
        self._scoring = AsyncScoring(
            calls, deadline_s=deadline_s, mark=lambda _: None, left=lambda _: None, done=self._ended
        )
        self._done = done
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self.thread.start()

    def send(self, asked: list[_Asked]) -> None:
        now = time.monotonic()
        for each in asked:
            each.since = now
            self.asked[each.item[0]] = each
        self._loop.call_soon_threadsafe(self._scoring.begin, [each.item for each in asked])

    def late(self, now: float, limit_s: float) -> list[_Asked]:
        """Returns those that it has had for longer than the limit."""
        return [asked for asked in list(self.asked.values()) if now - asked.since > limit_s]

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(BaseException):
            self._loop.run_forever()
        self._scoring.cancel()
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(asyncio.sleep(0))

    def _ended(self, result: Result) -> None:
        self._done(self.asked.pop(result[0]), result)


class ThreadRewards:
    """Scores completions with functions of this process, `def` or `async def`. `RewardPool` has the contract."""

    def __init__(
        self,
        rewards: str | Sequence[RewardSpec],
        functions: Mapping[str, Callable[..., Any]],
        *,
        threads: int = 1,
        deadline_s: float = 10.0,
        columns: Columns | None = None,
        most_abandoned: int = MOST_ABANDONED,
    ) -> None:
        """`rewards` are those of the task; a text is the name of its only one.

        `functions` are those that were given, by the names of their specs; others are imported.

        `columns` are those of the rows, which `start` compares with the parameters.
        """
        self._specs = specs = as_specs(rewards)
        self._functions = functions
        self._num_threads = threads
        self._deadline_s = deadline_s
        self._columns = None if columns is None else dict(sorted(columns.items()))
        self._most_abandoned = most_abandoned
        self._calls: list[RewardCall] = []
        self._shown = ", ".join(spec.shown for spec in specs)
        self._late = late_text(specs, deadline_s)
        self._late_texts = {self._late, *(late_text([spec], deadline_s) for spec in specs)}
        self._ids = itertools.count()
        self._queue: SimpleQueue[list[_Asked] | None] = SimpleQueue()
        self._arrived: list[_Asked] = []  # in this turn of the event loop
        self._threads: list[_PlainThread | _AsyncThread] = []
        self._abandoned: list[threading.Thread] = []
        self._pending: set[_Asked] = set()
        self._work = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def longest_s(self) -> float:
        """The longest that one completion can occupy a thread, in seconds."""
        batched = any(call.batched for call in self._calls) or not self._calls
        return longest_reward_s(len(self._specs), self._deadline_s, batched=batched)

    @property
    def forms(self) -> tuple[str, ...]:
        """The form in which each reward is called, in words, once the threads have started."""
        return tuple(call.form for call in self._calls)

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
        """Starts the threads. Raises `RecipeError` if a function cannot be called with the columns of the rows."""
        try:
            refuse_specs(self._specs)
            refuse_weightless(self._specs)
            self._calls = make_calls(self._specs, self._columns, self._functions)
        except SpecError as error:
            raise RecipeError(f"`reward` cannot be used: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._threads = [self._new_thread() for _ in range(self._most_threads)]
        self._watching = asyncio.create_task(self._watch(), name="reward deadlines")

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion. Raises `RewardError`, which names the cause, if it has none."""
        if self._loop is None or self._watching is None:
            raise RewardError(f"{self._shown} was asked for a reward while its threads were not running")
        asked = _Asked((next(self._ids), prompt, completion, row, details), self._loop.create_future())
        self._pending.add(asked)
        self._work.set()
        if not self._arrived:
            self._loop.call_soon(self._send_arrived)
        self._arrived.append(asked)
        try:
            return graded(self._specs, await asked.future)
        finally:
            self._pending.discard(asked)

    async def close(self) -> None:
        """Ends the threads without waiting for them. Pending calls raise `RewardError`. Safe to call twice."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self._fail(self._pending, RewardError(f"{self._shown} was stopped before it returned"))
        for thread in self._threads:
            thread.abandoned = True
            if isinstance(thread, _AsyncThread):
                thread.end()
            else:
                self._queue.put(None)
        self._threads.clear()

    @property
    def _is_async(self) -> bool:
        return any(call.asynchronous for call in self._calls)

    @property
    def _most_threads(self) -> int:
        return 1 if self._is_async else self._num_threads

    def _new_thread(self) -> _PlainThread | _AsyncThread:
        if self._is_async:
            return _AsyncThread(self._calls, self._deadline_s, self._done)
        return _PlainThread(self._calls, self._queue, self._done)

    def _send_arrived(self) -> None:
        """Sends what has arrived in one turn of the event loop: together to an event loop or for a batch."""
        some, self._arrived = self._arrived, []
        if self._is_async or any(call.batched for call in self._calls):
            size = math.ceil(len(some) / self._most_threads)
            for start in range(0, len(some), size):
                self._send(some[start : start + size])
        else:
            for asked in some:
                self._send([asked])

    def _send(self, asked: list[_Asked]) -> None:
        if not self._threads:
            self._fail(
                asked,
                RewardError(f"{self.num_abandoned} calls of {self._shown} hang in this process, which is the limit"),
            )
        elif isinstance(first := self._threads[0], _AsyncThread):
            first.send(asked)
        else:
            self._queue.put(asked)

    def _done(self, asked: _Asked, result: Result) -> None:
        """Takes a result, in the thread that has it. The run of an abandoned thread may be over."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, asked, result)

    def _deliver(self, asked: _Asked, result: Result) -> None:
        _, scores, error = result
        if asked.future.done():
            return
        if scores is None:
            asked.future.set_exception((LateRewardError if error in self._late_texts else RewardError)(str(error)))
        else:
            asked.future.set_result(scores)

    async def _watch(self) -> None:
        """Abandons threads that are stuck, and replaces them. Sleeps while nothing is to be scored."""
        while True:
            await self._work.wait()
            await asyncio.sleep(min(1.0, self._deadline_s / 10))
            for thread in list(self._threads):
                self._check(thread)
            while len(self._threads) < self._most_threads:
                if self.num_abandoned + len(self._threads) >= self._most_abandoned:
                    break  # those that work may hang too
                self._threads.append(self._new_thread())
            if not self._threads:
                self._fail(self._pending, RewardError(f"{self._late}, and {self.num_abandoned} such calls hang"))
            if not self._pending:
                self._work.clear()

    def _check(self, thread: _PlainThread | _AsyncThread) -> None:
        limit_s = self.longest_s if isinstance(thread, _AsyncThread) else self._deadline_s
        late = thread.late(time.monotonic(), limit_s)
        if not late:
            return
        again = [each for each in list(thread.asked.values()) if each not in late]
        thread.abandoned = True
        self._threads.remove(thread)
        self._abandoned.append(thread.thread)
        if isinstance(thread, _AsyncThread):
            thread.end()
        if len(late) > 1 and any(call.batched for call in self._calls):  # one of a batch: each is tried alone
            again += [each for each in late if not each.alone]
            late = [each for each in late if each.alone]
        self._fail(late, LateRewardError(self._late))
        again = [each for each in again if not each.future.done()]
        if again and not self._threads and self.num_abandoned < self._most_abandoned:
            self._threads.append(self._new_thread())
        for each in again:
            each.alone = True
            self._send([each])

    def _fail(self, items: set[_Asked] | list[_Asked], error: RewardError) -> None:
        for asked in items:
            if not asked.future.done():
                asked.future.set_exception(error)
