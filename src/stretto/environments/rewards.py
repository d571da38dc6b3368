"""Rewards run in a pool of processes: one that hangs can be killed there, and a heavy one does not starve decoding.

    score() --> queue --> one frame for all that is queued --> worker --> one frame of results --> futures
                  ^                                              |
                  +---- the others of its batch <---- killed: hung past its deadline, or died

A reward fails alone. The worker marks the item that it is on, so when it hangs or dies exactly that item fails, the
others of its batch are queued again, and another worker takes its place.

What a reward prints is read from its process line by line and handed to `said`, never to the terminal itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.reward_worker import LENGTH, MARK, NOTHING, Columns, Item, Result, frame, last_line
from stretto.errors import RecipeError, RewardError, StrettoError

log = logging.getLogger(__name__)

START_S = 120.0  # for importing the user's module
BATCH_S = 0.2  # a batch is sized to take about this long, so that workers share the work evenly
MAX_BATCH = 512
MAX_CONCURRENT = 512  # items of an `async def` reward in one worker
MAX_UNEXPLAINED_DEATHS = 3  # how often an item may be among the work of a worker that is lost, nobody knows for which
RETRY_S = 1.0  # between attempts to start a worker that failed to start
LONGEST_LINE = 2_000  # characters of one line that a reward prints


@dataclass(slots=True)
class _Pending:
    """An item that has no result yet."""

    item: Item
    future: asyncio.Future[float]
    sent_at: float = 0.0
    deaths: int = 0  # of workers that had it, and that nothing else is to blame for


@dataclass(slots=True)
class _Worker:
    """One live process."""

    process: asyncio.subprocess.Process
    marks: mmap.mmap
    listener: asyncio.Task[None]  # hears what it prints; ends with it
    asynchronous: bool
    in_flight: dict[int, _Pending] = field(default_factory=dict)
    seen: int = NOTHING  # the mark at the last look
    guilty: frozenset[int] | None = None  # once it was killed: the items that it was killed for

    def send(self, batch: list[_Pending]) -> None:
        """Raises what pickling the items raises, and then has sent nothing."""
        data = frame([pending.item for pending in batch])
        now = time.monotonic()
        for pending in batch:
            pending.sent_at = now
            self.in_flight[pending.item[0]] = pending
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def kill(self) -> None:
        # It leads a process group of its own, so whatever the reward has started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its end, and for the last that it printed; its exit code."""
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):  # a process that the reward started outside of its group holds the pipe
            await asyncio.wait_for(self.listener, 1.0)
        return code


class RewardPool:
    """Scores completions with `spec`, a `def` or `async def` called as `reward(prompt, completion, **row)`.

    A function without `**row` is given only the columns that it has parameters for. It returns a finite number; what
    else it does is a `RewardError` of that one item. Nothing is lost and nothing is scored twice, except the innocent
    items of a worker that was killed, which are scored again.
    """

    def __init__(
        self,
        spec: str,
        *,
        workers: int = 1,
        deadline_s: float = 10.0,
        columns: Columns | None = None,
        said: Callable[[str], None] | None = None,
    ) -> None:
        """`columns` are those that rows have, each with a row that lacks it, or None where all have it: with them, a
        function that cannot be called so is refused at the start.
        `said` is told every line that the function prints; by default it is logged."""
        module, _, function = spec.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
            raise RecipeError(f"`task.reward = {spec!r}` is no function: write it as `package.module:function`")
        if workers < 1:
            raise RecipeError(f"`task.reward_workers = {workers}` must be at least 1")
        if not deadline_s > 0:
            raise RecipeError(f"`task.reward_seconds = {deadline_s}` must be more than 0")
        self._spec = spec
        self._num_workers = workers
        self._deadline_s = deadline_s
        self._columns = None if columns is None else dict(sorted(columns.items()))
        self._said = said if said is not None else _log_line
        self._late = f"`{spec}` did not return within `task.reward_seconds = {deadline_s:g}`"
        self._ids = itertools.count()
        self._queue: deque[_Pending] = deque()
        self._workers: dict[int, _Worker] = {}  # by slot
        self._tasks: list[asyncio.Task[None]] = []
        self._dispatching = False
        self._work = asyncio.Event()  # set while anything is queued or in flight
        self._item_s = 0.0  # running mean of the time of one item in a `def` reward
        self._closed = False
        self._failure: StrettoError | None = None  # of the pool itself, not of a reward
        self.replaced = 0  # workers that were killed or died

    @property
    def longest_s(self) -> float:
        """After so long at most an item ends, its worker's replacement included: then another one is begun."""
        return self._deadline_s + max(1.0, self._deadline_s) + START_S

    async def start(self) -> None:
        """Start the workers; a `spec` that cannot be imported or called is a `RecipeError`."""
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._num_workers)]
        self._tasks = [
            asyncio.create_task(self._serve(slot, ready[slot]), name=f"reward worker {slot}")
            for slot in range(self._num_workers)
        ]
        self._tasks.append(asyncio.create_task(self._watch(), name="reward deadlines"))
        for task in self._tasks:
            task.add_done_callback(self._ended)
        try:
            outcomes = await asyncio.gather(*ready, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The reward of one completion, or a `RewardError` that says what went wrong."""
        if self._failure is not None:
            raise self._failure
        if self._closed or not self._tasks:
            raise RewardError(f"`{self._spec}` was asked for a reward while its workers were not running")
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._queue.append(_Pending((next(self._ids), prompt, completion, row), future))
        self._schedule()
        return await future

    async def close(self) -> None:
        """Kill the workers. Pending calls raise `RewardError`. Safe to call twice."""
        self._closed = True
        for worker in self._workers.values():
            worker.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # how they ended is in `_failure`
        self._tasks = []
        self._fail_all(RewardError(f"`{self._spec}` was stopped before it returned"))
        self._workers.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = StrettoError(f"the pool of reward workers failed in `{task.get_name()}`: {error!r}")
            self._failure.__cause__ = error
            self._fail_all(self._failure)

    def _fail_all(self, error: StrettoError) -> None:
        left = [*self._queue, *(p for worker in self._workers.values() for p in worker.in_flight.values())]
        for pending in left:
            if not pending.future.done():
                pending.future.set_exception(error)
        self._queue.clear()

    # -- out: from the queue to the workers ---------------------------------------------------------------------------

    def _schedule(self) -> None:
        # Everything that is asked for in this turn of the loop goes out in one frame.
        if not self._dispatching:
            self._dispatching = True
            self._work.set()
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        rooms = [(self._room(worker), worker) for worker in self._workers.values() if worker.guilty is None]
        rooms = [(room, worker) for room, worker in rooms if room > 0]
        for left in range(len(rooms), 0, -1):
            room, worker = rooms[left - 1]
            size = min(room, math.ceil(len(self._queue) / left))
            batch = [pending for _ in range(size) if not (pending := self._queue.popleft()).future.done()]
            if batch:
                self._send(worker, batch)

    def _send(self, worker: _Worker, batch: list[_Pending]) -> None:
        try:
            worker.send(batch)
        except Exception as error:  # pickling raises whatever the values of a row raise
            if len(batch) == 1:
                _fail(batch[0], f"a row cannot be sent to `{self._spec}`: {last_line(error)}")
                return
            for pending in batch:
                self._send(worker, [pending])

    def _room(self, worker: _Worker) -> int:
        if worker.asynchronous:
            return MAX_CONCURRENT - len(worker.in_flight)
        if worker.in_flight:
            return 0
        # One worker has nobody to share with; a time not yet known is taken to be short.
        return (
            MAX_BATCH
            if self._num_workers == 1 or self._item_s == 0
            else max(1, min(MAX_BATCH, int(BATCH_S / self._item_s)))
        )

    # -- back: from the workers to the futures ------------------------------------------------------------------------

    async def _serve(self, slot: int, ready: asyncio.Future[None]) -> None:
        """Keep one worker alive, from the pool's start to its end."""
        while True:
            try:
                worker = await self._spawn()
            except RecipeError as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                await self._refuse(str(error))
                continue
            self._workers[slot] = worker
            try:
                if not ready.done():
                    ready.set_result(None)
                self._schedule()
                await self._deliver(worker)
            finally:
                worker.kill()  # its output has ended, or the pool has: it is of no use any more
                code = await worker.ended()
            self._bury(slot, worker, code)

    async def _refuse(self, reason: str) -> None:
        """A replacement that does not start fails what is queued, unless another worker is there for it."""
        if not self._workers:
            while self._queue:
                _fail(self._queue.popleft(), reason)
        await asyncio.sleep(RETRY_S)

    async def _spawn(self) -> _Worker:
        with tempfile.TemporaryFile() as memory:
            memory.truncate(mmap.PAGESIZE)
            marks = mmap.mmap(memory.fileno(), MARK.size)
            MARK.pack_into(marks, 0, time.monotonic(), NOTHING)
            paths = [os.getcwd(), *(path or os.getcwd() for path in sys.path)]
            call = f"from stretto.environments.reward_worker import main; main({memory.fileno()})"
            # Not `multiprocessing`: its `spawn` runs the parent's main module again, and imports torch with it.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"import sys; sys.path[:] = {list(dict.fromkeys(paths))!r}; {call}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[memory.fileno()],
                start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    **os.environ,
                },  # the cores are the engine's and the trainer's
            )
        listener = asyncio.create_task(self._listen(process), name="reward output")
        worker = _Worker(process, marks, listener, asynchronous=False)
        try:
            assert process.stdin is not None
            process.stdin.write(frame((self._spec, self._columns, self._deadline_s, self._late)))
            async with asyncio.timeout(START_S):
                error, worker.asynchronous = await _read(process)
        except TimeoutError:
            error = f"it could not be imported within {START_S:g} s"
        except asyncio.IncompleteReadError:
            error = f"it {_how_it_ended(await process.wait())} while it was imported"
        except BaseException:
            worker.kill()
            await worker.ended()
            raise
        if error is not None:
            worker.kill()
            await worker.ended()
            raise RecipeError(f"`task.reward = {self._spec!r}` cannot be used: {error}")
        return worker

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Hand on what the reward prints, line by line, until its process has ended."""
        assert process.stderr is not None
        rest = b""
        while piece := await process.stderr.read(1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._hear(line)
        if rest:
            self._hear(rest)

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip()[:LONGEST_LINE]
        if text:
            self._said(text)

    async def _deliver(self, worker: _Worker) -> None:
        """Hand results over until the worker's output ends."""
        while True:
            try:
                results: list[Result] = await _read(worker.process)
            except asyncio.IncompleteReadError:
                return
            self._measure(worker, len(results))
            for identity, value, error in results:
                pending = worker.in_flight.pop(identity)
                if pending.future.done():
                    continue
                if value is None:
                    pending.future.set_exception(RewardError(error))
                else:
                    pending.future.set_result(value)
            if self._queue:
                self._schedule()

    def _measure(self, worker: _Worker, num_results: int) -> None:
        if worker.asynchronous:
            return
        now = time.monotonic()
        sent_at = next(iter(worker.in_flight.values())).sent_at
        item_s = (now - sent_at) / num_results
        self._item_s = item_s if self._item_s == 0 else 0.8 * self._item_s + 0.2 * item_s
        for pending in worker.in_flight.values():
            pending.sent_at = now

    def _bury(self, slot: int, worker: _Worker, code: int) -> None:
        """A worker is gone: fail the item that it is gone for, and queue the others again in their order."""
        del self._workers[slot]
        self.replaced += 1
        marked = MARK.unpack_from(worker.marks)[1]
        # Killed for an item that hung, its own end says nothing: what counts is why it was killed.
        died = self._late if worker.guilty else f"`{self._spec}` {_how_it_ended(code)}"
        blamed = frozenset([marked]) if worker.guilty is None else worker.guilty
        found = not blamed.isdisjoint(worker.in_flight)  # else each of them may be what it is gone for
        again = []
        for identity, pending in worker.in_flight.items():
            if identity in blamed:
                _fail(pending, self._late if worker.guilty else f"{died} while it scored this completion")
                continue
            pending.deaths += not found
            if pending.deaths >= MAX_UNEXPLAINED_DEATHS:
                _fail(
                    pending, f"{died}; {MAX_UNEXPLAINED_DEATHS} workers were lost so, this completion among their work"
                )
            else:
                again.append(pending)
        self._queue.extendleft(reversed(again))

    # -- deadlines ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill workers that are stuck. Sleeps for good while there is nothing to do."""
        while True:
            await self._work.wait()
            await asyncio.sleep(min(1.0, self._deadline_s / 10))
            for worker in self._workers.values():
                if worker.in_flight and worker.guilty is None:
                    worker.guilty = self._stuck(worker)
                    if worker.guilty is not None:
                        worker.kill()
            if not self._queue and not any(worker.in_flight for worker in self._workers.values()):
                self._work.clear()

    def _stuck(self, worker: _Worker) -> frozenset[int] | None:
        """None: the worker is well. Else the items that it is to be killed for, none where nobody is to blame."""
        since, marked = MARK.unpack_from(worker.marks)
        now = time.monotonic()
        # The mark is two words and may be read half written: a first look at an item is never held against it.
        seen, worker.seen = worker.seen, marked
        if marked != NOTHING:
            return frozenset([marked]) if marked == seen and now - since > self._deadline_s else None
        limit_s = self._deadline_s + max(1.0, self._deadline_s)
        overdue = frozenset(i for i, pending in worker.in_flight.items() if now - pending.sent_at > limit_s)
        if not overdue:
            return None
        # An `async def` that outlives its cancellation is to blame; a `def` that was never begun is not.
        return overdue if worker.asynchronous else frozenset()


async def _read(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return pickle.loads(await process.stdout.readexactly(size))


def _log_line(line: str) -> None:
    log.warning("the reward function printed: %s", line)


def _fail(pending: _Pending, reason: str) -> None:
    if not pending.future.done():
        pending.future.set_exception(RewardError(reason))


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"
