"""Runs the reward functions in a pool of processes and enforces their deadline, `task.reward_seconds`.

The deadline is enforced here and nowhere else: a worker whose reward runs past it is killed, and that one item fails
with a `RewardError`. Processes also keep a slow reward from delaying decoding and training, which need this process.

    score() --> queue --> one frame with all queued items --> worker --> one frame of results --> futures
                  ^                                             |
                  +---- the other items of its batch <---- killed at the deadline, or died

- One item fails, not its batch. The worker marks the item that it is scoring. If the worker hangs or dies, that item
  fails, the other items of the batch are queued again, and a new worker replaces the old one.
- A worker that writes anything but results to its pipe (`reward_pipes.py`) is killed too.
- If it is unknown which item cost a worker, its items are sent again in smaller batches, finally one by one, until the
  item that does it fails alone. If a call with several items (`reward_calls.py`) hangs, they are sent one by one.
- A judge or a reward model that loses its process again and again halts scoring: no item fails because of it. So does
  a module that cannot be imported any more when its worker is replaced.
- An `async def` reward is cancelled at its deadline inside the worker. The pool kills the worker only if the function
  blocks the event loop or ignores the cancellation.
- `worker_process.py` says what a worker sees, where its output goes and how it ends.

Why not the package pebble: with a deadline for each reward it costs the driver 53 us of processor time a reward, this
pool 8 us. With chunks it costs 3 us, but then an item that hangs fails its whole chunk. It has none of the other
properties above (`LOG.md`, 2026-11-16).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.function_specs import SpecError, last_line
from stretto.environments.grades import Grade, graded
from stretto.environments.reward_calls import (
    Columns,
    Details,
    RewardSpec,
    as_specs,
    late_text,
    refuse_specs,
    refuse_targets,
)
from stretto.environments.reward_pipes import (
    BrokenFrameError,
    Greeting,
    Item,
    Scores,
    max_frame_bytes,
    read_results,
    read_reward_greeting,
    request_frame,
)
from stretto.environments.reward_scoring import IN_BATCH
from stretto.environments.reward_worker import MARK, NOTE, NOTHING, read_note
from stretto.environments.sandbox import Limits
from stretto.environments.scoring_errors import halt_reason
from stretto.environments.worker_process import START_S, GreetingError, WorkerOptions, WorkerProcess, how_it_ended
from stretto.errors import LateRewardError, RecipeError, RewardError, ScoringHaltedError, StrettoError

log = logging.getLogger(__name__)

BATCH_S = 0.2  # a batch is sized to take about this long, so that the workers share the work evenly
MAX_BATCH = 512
MAX_CONCURRENT = 512  # items of an `async def` reward in one worker
# The batch size for items that were in flight on 0, 1, 2 workers that were lost for an unknown reason.
BATCH_AFTER_DEATHS = (MAX_BATCH, 16, 1)
MAX_UNEXPLAINED_DEATHS = len(BATCH_AFTER_DEATHS)
ALONE = MAX_UNEXPLAINED_DEATHS - 1  # the deaths from which on an item is sent alone
STARTS = 3  # attempts to replace the last worker
RETRY_S = 1.0  # between them
RESUME = "find out why (perhaps memory ran out), then continue with `--resume`"


@dataclass(slots=True)
class _Pending:
    """An item without a result."""

    item: Item
    future: asyncio.Future[Scores]
    sent_at: float = 0.0
    deaths: int = 0  # workers lost for an unknown reason while they held this item


@dataclass(slots=True)
class _Worker:
    """One live worker process."""

    process: WorkerProcess
    asynchronous: bool
    in_flight: dict[int, _Pending] = field(default_factory=dict)
    last_mark: int = NOTHING  # the mark at the previous check
    killed_for: frozenset[int] | None = None  # the late items that it was killed for; None: it was not killed
    late_batch: bool = False  # it was killed because a call with several items was late
    broken: str | None = None  # what it wrote instead of results

    def send(self, batch: list[_Pending]) -> None:
        """Sends a batch. If pickling the items raises, nothing is sent and the error is passed on."""
        data = request_frame([pending.item for pending in batch])
        now = time.monotonic()
        for pending in batch:
            pending.sent_at = now
            self.in_flight[pending.item[0]] = pending
        self.process.write(data)


class RewardPool:
    """Scores completions with the rewards of a task. `reward_calls.py` says how a function is called.

    A reward is a finite number whose magnitude is at most `MAX_REWARD`, or None where there are several; anything else
    is a `RewardError` of that one item. Every item gets exactly one result. Only the items that share a batch with one
    that hangs or kills the worker may be scored more than once.
    """

    def __init__(
        self,
        rewards: str | Sequence[RewardSpec],
        *,
        workers: int = 1,
        deadline_s: float = 10.0,
        columns: Columns | None = None,
        on_output: Callable[[str], None] | None = None,
        extra_environment: Mapping[str, str] | None = None,
        sandbox: Limits | None = None,
        strict_sandbox: bool = False,
    ) -> None:
        """Checks the options; `start` starts the workers.

        `rewards` are those of the task; a text is the `package.module:function` of its only one.
        `columns` maps each column of the rows to a row that lacks it, or to None if all rows have it. With it, `start`
        refuses a function that cannot be called with these columns.
        `on_output` gets every line that the functions print; by default lines are logged.
        `extra_environment` holds variables for the workers beside those that every worker gets.
        `sandbox` holds the limits of a sandbox for each worker; None: no sandbox. If `strict_sandbox`, `start` refuses
        a machine on which a part of the sandbox does not hold.
        A judge or a reward model (`RewardSpec.built`) is the only reward of its pool, and brings its own deadline.
        """
        self._specs = as_specs(rewards)
        try:
            refuse_targets(self._specs)
            refuse_specs(self._specs)
        except SpecError as error:
            raise RecipeError(str(error)) from error
        if workers < 1:
            raise RecipeError(f"`task.reward_workers = {workers}` must be at least 1")
        if not deadline_s > 0:
            raise RecipeError(f"`task.reward_seconds = {deadline_s}` must be more than 0")
        self._shown = ", ".join(spec.shown for spec in self._specs)
        self._num_workers = workers
        self._built = built = self._specs[0].built
        assert built is None or len(self._specs) == 1, "a built scorer has its workers to itself"
        self._deadline_s = deadline_s if built is None else built.deadline_s
        self._start_s = START_S if built is None else built.start_s
        self._most_at_once = MAX_CONCURRENT if built is None else built.most_at_once
        self._columns = None if columns is None else dict(sorted(columns.items()))
        variables = {**(extra_environment or {}), **({} if built is None else built.environment)}
        self._options = WorkerOptions(on_output or _log_line, variables, sandbox, strict_sandbox)
        self._late = late_text(self._specs, self._deadline_s)
        self._late_texts = {self._late, *(late_text([spec], self._deadline_s) for spec in self._specs)}
        self._greeting = Greeting()  # of the first worker
        self._ids = itertools.count()
        self._queue: deque[_Pending] = deque()
        self._workers: dict[int, _Worker] = {}  # by slot
        self._tasks: list[asyncio.Task[None]] = []
        self._dispatching = False
        self._work = asyncio.Event()  # set while anything is queued or in flight
        self._item_s = 0.0  # running mean of the time of one item in a `def` reward
        self._closed = False
        self._warned = False  # about a worker that wrote something else than results
        self._failure: StrettoError | None = None  # of the pool itself, not of a reward
        self.replaced = 0  # workers that were killed or died

    @property
    def longest_s(self) -> float:
        """The longest that one item can occupy a worker, in seconds, including the start of a replacement.

        With several rewards, each may take its time, twice if its batch failed.
        """
        return self._longest_s + self._start_s

    @property
    def _longest_s(self) -> float:
        batched = self._greeting.batched if self._greeting.forms else self._specs[0].batched is not False
        batched = batched and self._built is None
        return longest_reward_s(len(self._specs), self._deadline_s, batched=batched)

    @property
    def forms(self) -> tuple[str, ...]:
        """The form in which each reward is called, in words, once the pool has started."""
        return self._greeting.forms

    @property
    def waiting(self) -> str:
        """A sentence on what the scorer waits for, such as a judge that is away; empty if it waits for nothing."""
        return next((note for worker in self._workers.values() if (note := read_note(worker.process.marks))), "")

    async def start(self) -> None:
        """Starts the workers. Raises `RecipeError` if `spec` cannot be imported or called."""
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

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion. Raises `RewardError`, which names the cause, if it has none."""
        return graded(self._specs, await self.scores(prompt, completion, row, details))

    async def scores(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> Scores:
        """Returns what each reward says of one completion, in their order. Raises `RewardError` as `score` does."""
        if self._failure is not None:
            raise self._failure
        if self._closed or not self._tasks:
            raise RewardError(f"{self._shown} was asked for a reward while its workers were not running")
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        more = None if details is None else details.only(self._greeting.wants)
        self._queue.append(_Pending((next(self._ids), prompt, completion, row, more), future))
        self._schedule()
        return await future

    async def close(self) -> None:
        """Kills the workers. Pending calls raise `RewardError`. Safe to call twice."""
        self._closed = True
        for worker in self._workers.values():
            worker.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # errors are in `_failure`
        self._tasks = []
        self._fail_all(RewardError(f"{self._shown} was stopped before it returned"))
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
        # All requests of this turn of the event loop go out in one frame.
        if not self._dispatching:
            self._dispatching = True
            self._work.set()
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        alive = [worker for worker in self._workers.values() if worker.killed_for is None]
        free = [(capacity, worker) for worker in alive if (capacity := self._capacity(worker)) > 0]
        for num_left in range(len(free), 0, -1):
            capacity, worker = free[num_left - 1]
            if batch := self._next_batch(worker, min(capacity, math.ceil(len(self._queue) / num_left))):
                self._send(worker, batch)

    def _next_batch(self, worker: _Worker, size: int) -> list[_Pending]:
        """Takes the next items for a worker out of the queue.

        Items that may have cost a worker go only with items that were suspected as often, to an idle worker.
        """
        batch: list[_Pending] = []
        deaths = self._queue[0].deaths if self._queue else 0
        if deaths:
            size = 0 if worker.in_flight else min(size, BATCH_AFTER_DEATHS[deaths])
        while self._queue and len(batch) < size and self._queue[0].deaths == deaths:
            pending = self._queue.popleft()
            if not pending.future.done():
                batch.append(pending)
        return batch

    def _send(self, worker: _Worker, batch: list[_Pending]) -> None:
        try:
            worker.send(batch)
        except Exception as error:  # pickling a row can raise anything
            if len(batch) == 1:
                _fail(batch[0], RewardError(f"a row cannot be sent to {self._shown}: {last_line(error)}"))
                return
            for pending in batch:
                self._send(worker, [pending])

    def _capacity(self, worker: _Worker) -> int:
        """The number of items that a worker can take now."""
        if worker.asynchronous:
            first = next(iter(worker.in_flight.values()), None)  # all items in flight have the same `deaths`
            return 0 if first is not None and first.deaths else self._most_at_once - len(worker.in_flight)
        if worker.in_flight:
            return 0
        # A single worker takes all. Until a reward has been timed, it is assumed to be fast.
        return (
            MAX_BATCH
            if self._num_workers == 1 or self._item_s == 0
            else max(1, min(MAX_BATCH, int(BATCH_S / self._item_s)))
        )

    # -- back: from the workers to the futures ------------------------------------------------------------------------

    async def _serve(self, slot: int, ready: asyncio.Future[None]) -> None:
        """Keeps one worker alive until the pool is closed, or until scoring halts because no worker can be started."""
        attempts = 0
        while True:
            try:
                worker = await self._spawn()
            except RecipeError as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                attempts += 1
                # A judge may be away now. A module may be edited just now, and be whole again soon.
                if self._built is not None or (attempts >= STARTS and not self._workers):
                    self._fail_all(self._halt(f"{error}; correct that, then continue with `--resume`"))
                    return
                await asyncio.sleep(RETRY_S)
                continue
            attempts = 0
            self._workers[slot] = worker
            try:
                if not ready.done():
                    ready.set_result(None)
                self._schedule()
                await self._deliver(worker)
            except BrokenFrameError as error:
                worker.broken = str(error)
                if not self._warned:  # once: each completion that fails because of it has the reason too
                    self._warned = True
                    log.warning("a reward worker is replaced: %s", self._broken_text(worker))
            finally:
                worker.process.kill()  # its output or the pool has ended
                code = await worker.process.ended()
            self._handle_exit(slot, worker, code)

    async def _spawn(self) -> _Worker:
        specs = [spec.without_secrets() for spec in self._specs]
        marks = MARK.pack(time.monotonic(), NOTHING) + bytes(NOTE.size)
        process = await WorkerProcess.spawn("stretto.environments.reward_worker", marks, self._options)
        message = (specs, self._columns, self._deadline_s)
        try:
            greeting = await process.greeted(message, read_reward_greeting, self._start_s)
        except GreetingError as failed:
            raise self._unusable(str(failed)) from None
        if greeting.error is not None:
            await process.end()
            raise self._unusable(greeting.error)
        self._greeting = greeting
        return _Worker(process, greeting.asynchronous)

    def _unusable(self, why: str) -> RecipeError:
        """Returns the error of rewards whose worker could not be started."""
        only = self._specs[0]
        named = "task.rewards" if only.name else f"task.reward = {only.target!r}"
        if self._built is not None:
            named = self._built.option
        return RecipeError(f"`{named}` cannot be used: {why}")

    async def _deliver(self, worker: _Worker) -> None:
        """Delivers results until the worker's output ends. Raises `BrokenFrameError` for anything but results."""
        while True:
            try:
                body = await worker.process.read(lambda: max_frame_bytes(len(worker.in_flight), len(self._specs)))
            except asyncio.IncompleteReadError:
                return
            results = read_results(body, worker.in_flight.keys(), len(self._specs), may_lack=bool(self._specs[0].name))
            self._measure(worker, len(results))
            for identity, scores, error in results:
                pending = worker.in_flight.pop(identity)
                if pending.future.done():
                    continue
                if (halt := halt_reason(error)) is not None:
                    pending.future.set_exception(self._halt(halt))
                elif scores is None:
                    late = error in self._late_texts
                    pending.future.set_exception((LateRewardError if late else RewardError)(error))
                else:
                    pending.future.set_result(scores)
            if self._queue:
                self._schedule()

    def _halt(self, reason: str) -> StrettoError:
        """Ends scoring, which cannot go on. Returns the error that all completions without a result get."""
        if self._failure is None:
            self._failure = ScoringHaltedError(reason)
            asyncio.get_running_loop().call_soon(self._fail_all, self._failure)  # after the results of this frame
        return self._failure

    def _measure(self, worker: _Worker, num_results: int) -> None:
        if worker.asynchronous:
            return
        now = time.monotonic()
        sent_at = next(iter(worker.in_flight.values())).sent_at
        item_s = (now - sent_at) / num_results
        self._item_s = item_s if self._item_s == 0 else 0.8 * self._item_s + 0.2 * item_s
        for pending in worker.in_flight.values():
            pending.sent_at = now

    def _handle_exit(self, slot: int, worker: _Worker, code: int) -> None:
        """Fails the item that cost a worker, and puts its other items back at the head of the queue, in order."""
        del self._workers[slot]
        self.replaced += 1
        marked = MARK.unpack_from(worker.process.marks)[1]
        no_item: frozenset[int] = frozenset()
        if worker.killed_for:  # the exit code says only that it was killed
            died, blamed = self._late, worker.killed_for
        elif worker.broken is not None:  # perhaps an earlier item wrote to the pipe
            died, blamed = self._broken_text(worker), no_item
        else:
            died = f"{self._shown} {how_it_ended(code)}"
            # A judge or a reward model runs no code of a completion: none is to blame.
            blamed = frozenset([marked]) if worker.killed_for is None and self._built is None else no_item
        found = not blamed.isdisjoint(worker.in_flight)  # if not, any of them may be the cause
        again = []
        for identity, pending in worker.in_flight.items():
            if identity in blamed:
                if worker.killed_for:
                    _fail(pending, LateRewardError(self._late))
                else:
                    _fail(pending, RewardError(f"{died} while it scored this completion"))
                continue
            if worker.late_batch and len(worker.in_flight) > 1:
                pending.deaths = max(pending.deaths, ALONE)
            else:
                pending.deaths += not found
            if pending.deaths >= MAX_UNEXPLAINED_DEATHS:
                lost = f"{died}; {MAX_UNEXPLAINED_DEATHS} workers were lost while they had this completion"
                _fail(pending, RewardError(lost) if self._built is None else self._halt(f"{lost}; {RESUME}"))
            else:
                again.append(pending)
        self._queue.extendleft(reversed(again))

    def _broken_text(self, worker: _Worker) -> str:
        return f"{self._shown} wrote something else than results to its pipe ({worker.broken})"

    # -- deadlines ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kills workers that are stuck. Sleeps while no item is queued or in flight."""
        while True:
            await self._work.wait()
            await asyncio.sleep(min(1.0, self._deadline_s / 10))
            for worker in self._workers.values():
                if worker.in_flight and worker.killed_for is None:
                    worker.killed_for = self._late_items(worker)
                    if worker.killed_for is not None:
                        worker.process.kill()
            if not self._queue and not any(worker.in_flight for worker in self._workers.values()):
                self._work.clear()

    def _late_items(self, worker: _Worker) -> frozenset[int] | None:
        """Returns the items that a worker must be killed for, or None if it is not stuck.

        The set is empty if the worker is stuck and no item is known to be the cause.
        """
        since, marked = MARK.unpack_from(worker.process.marks)
        now = time.monotonic()
        # The mark is two words and may be read half written, so an item counts only if two checks in a row see it.
        previous, worker.last_mark = worker.last_mark, marked
        if marked == IN_BATCH:
            worker.late_batch = marked == previous and now - since > self._deadline_s
            return frozenset() if worker.late_batch else None
        if marked != NOTHING:
            return frozenset([marked]) if marked == previous and now - since > self._deadline_s else None
        limit_s = self._longest_s
        overdue = frozenset(i for i, pending in worker.in_flight.items() if now - pending.sent_at > limit_s)
        if not overdue:
            return None
        # An `async def` that ignores its cancellation is the cause; a `def` that was never started is not.
        return overdue if worker.asynchronous else frozenset()


def longest_reward_s(num_rewards: int, deadline_s: float, *, batched: bool) -> float:
    """The longest that the calls for one item can take, in seconds; a batch that fails is tried again."""
    return num_rewards * (1 + batched) * deadline_s + max(1.0, deadline_s)


def _log_line(line: str) -> None:
    log.warning("the reward function printed: %s", line)


def _fail(pending: _Pending, error: StrettoError) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
