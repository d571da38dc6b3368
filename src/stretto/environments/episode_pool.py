"""Plays episodes in worker processes, so that an environment that blocks, dies or leaks costs its own episode alone.

    episode() --> Play --> worker --> Ask --> policy.generate() --> Answer --> worker --> ... --> Ended --> reward

Each process plays many episodes at once, on an event loop of its own (`episode_worker.py`). The pool is the
`Environment` that the run loop knows: it serves what the workers ask for from the policy. Only new tokens travel, as
both sides keep the context of each lineage.

- *A worker that hangs.* A worker writes the time into shared memory. If its event loop has not done so for `hang_s`, an
  episode blocks it, and the worker is killed and replaced.
- *A worker that dies*, or that writes anything but messages to its pipe, is replaced too.
- *The episodes of a worker that is lost are run again.* If it is known which episode cost the worker, that one fails
  with a `RewardError`, which the run counts as a failed attempt. The others begin again on another worker, and are
  handed the turns that they had. If it is not known, all of them fail. None gets a reward that its environment did not
  return.
- *A worker that leaks*, that has played `max_episodes`, in which an episode goes on for `hang_s` after it was cancelled
  or in which `MAX_HANGING` calls of tools hang gets no new episodes. It ends after its last one, and another worker
  takes its place at once. At twice `max_bytes` it is killed.
- `worker_process.py` says what a worker sees, where its output goes and how it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.custom import EnvironmentSpec
from stretto.environments.episode_pipes import (
    MAX_FRAME,
    Cancel,
    Close,
    Ended,
    Failed,
    FromWorker,
    Play,
    ToWorker,
    read_message,
)
from stretto.environments.episode_server import EpisodeServer
from stretto.environments.episode_worker import CLOSE_S, FIRST_MARK, MARK
from stretto.environments.function_specs import last_line
from stretto.environments.protocol import Outcome, Policy
from stretto.environments.replayed_policy import ReplayedPolicy
from stretto.environments.reward_pipes import BrokenFrameError, read_greeting, request_frame
from stretto.environments.worker_process import START_S, GreetingError, WorkerOptions, WorkerProcess, how_it_ended
from stretto.errors import LateRewardError, RecipeError, RewardError, StrettoError
from stretto.types import Prompt

log = logging.getLogger(__name__)

MODULE = "stretto.environments.episode_worker"
BEAT_S = 1.0  # between two signs of life of a worker, at most
CHECKS = 10  # of a worker within the time in which it must show one
MISSED = 3  # signs of life, after which an episode seems to block its worker
RERUNS = 3  # of one episode, each because another one cost its worker
RETRY_S = 1.0  # between attempts to start a worker
MAX_HANGING = 32  # calls of tools in one worker: at twice as many, no tool is called there any more
MAX_MESSAGES = 10_000  # of one episode that the pool has not handled


@dataclass(frozen=True, slots=True)
class EpisodePoolOptions:
    """The options of a pool, wherever it runs."""

    spec: EnvironmentSpec
    tokenizer: bytes  # pickled
    workers: int | None = None  # processes; None: by the cores of the machine
    hang_s: float = 450.0  # without a sign of life of an event loop, until its worker is killed
    hang_reason: str = "half of `runtime.stall_seconds`"  # says where `hang_s` comes from
    max_bytes: int | None = None  # of memory, after which a worker is replaced
    max_episodes: int | None = None  # after which a worker is replaced


def default_workers() -> int:
    """Returns the number of worker processes on this machine: one for four cores, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 4))


class _LostError(Exception):
    """The worker of an episode was lost, and another episode was the cause."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The last event of an episode whose worker is lost; `error` None: another episode was the cause."""

    error: RewardError | None


_Session = asyncio.Queue[FromWorker | _Lost]
"""The messages of one episode on a worker."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One live worker process."""

    process: WorkerProcess
    wants_close: bool
    sessions: dict[int, _Session] = field(default_factory=dict)
    cancelled: dict[int, float] = field(default_factory=dict)  # when episodes were whose end it has not told
    begun: int = 0  # episodes
    retiring: bool = False  # gets no new episode
    died: str = ""  # why it was killed
    hung: bool = False  # killed because its event loop was blocked
    bloated: bool = False  # killed because of its memory, which no single episode can be blamed for
    gone: bool = False  # its output has ended; its process has too, or is being killed
    closing: bool = False  # told to end
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # its slot is free
    outbox: list[bytes] = field(default_factory=list)

    @property
    def beat(self) -> float:
        """The time at which its event loop was last alive."""
        return float(MARK.unpack_from(self.process.marks)[0])

    @property
    def step(self) -> int:
        """The episode whose step its event loop runs, or ran last before it was lost; negative if it runs none."""
        return int(MARK.unpack_from(self.process.marks)[1])

    @property
    def memory(self) -> int:
        """Bytes of memory that it takes."""
        return int(MARK.unpack_from(self.process.marks)[2])

    @property
    def hanging_calls(self) -> int:
        """The number of calls of tools that hang in it."""
        return int(MARK.unpack_from(self.process.marks)[3])

    def send(self, message: ToWorker) -> None:
        """Sends a message, in one write with all others of this turn of the event loop. Passes on pickling errors."""
        frame = request_frame(message)
        if not self.outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self.outbox.append(frame)

    def _flush(self) -> None:
        frames, self.outbox = self.outbox, []
        if not self.gone:
            self.process.write(b"".join(frames))

    def retire(self) -> None:
        """Gives it no other episode. It ends when its last one has."""
        self.retiring = True
        self.replaced.set()
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """Ends it if it gets no new episode and has none left."""
        if self.retiring and not self.sessions and not self.closing and not self.gone:
            self.close()

    def close(self) -> None:
        """Ends it, after its environment has ended if that wants to."""
        self.closing = True
        if self.wants_close:
            self.send(Close())
        else:
            self.process.kill()


class EpisodePool:
    """The environment `spec`, whose episodes are played by worker processes."""

    def __init__(
        self, options: EpisodePoolOptions, worker_options: WorkerOptions, *, notice: Callable[[str], None] = log.warning
    ) -> None:
        """`notice` gets a sentence for every worker that is lost."""
        self.replaced = 0  # workers that were killed or died
        self.retired = 0  # workers that were replaced between episodes
        self._options = options
        self._worker_options = worker_options
        self._notice = notice
        self._name = options.spec.name
        self._beat_s = min(BEAT_S, options.hang_s / CHECKS)
        self._num_workers = default_workers() if options.workers is None else options.workers
        self._ids = itertools.count()
        self._workers: set[_Worker] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()  # episodes without a worker
        self._tasks: list[asyncio.Task[None]] = []
        self._tending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._failure: StrettoError | None = None  # of the pool itself, not of an episode

    # -- its life ------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> dict[int, int]:
        """Bytes of memory of each process that lives, by its id."""
        return {worker.process.pid: worker.memory for worker in self._workers}

    async def start(self) -> None:
        """Starts the workers. Raises `RecipeError` if the environment cannot be imported or made."""
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._num_workers)]
        self._tasks = [
            asyncio.create_task(self._keep(ready[slot]), name=f"episode worker {slot}")
            for slot in range(self._num_workers)
        ]
        self._tasks.append(asyncio.create_task(self._watch(), name="episode workers' signs of life"))
        for task in self._tasks:
            task.add_done_callback(self._ended)
        try:
            for outcome in await asyncio.gather(*ready, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the workers. Episodes in progress raise `RewardError`. Safe to call twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.close()
        if any(worker.wants_close for worker in self._workers):
            await asyncio.wait([*self._tending], timeout=CLOSE_S + 1.0)
        for worker in self._workers:
            worker.process.kill()
        await asyncio.gather(*self._tasks, *self._tending, return_exceptions=True)  # errors are in `_failure`
        self._tasks = []
        self._fail_waiting(self._stopped())

    def _stopped(self) -> RewardError:
        return RewardError(f"`{self._name}` was stopped before its episode ended")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = StrettoError(f"the pool of episode workers failed in `{task.get_name()}`: {error!r}")
            self._failure.__cause__ = error
            for worker in self._workers:
                self._fail_sessions(worker, RewardError(str(self._failure)))
            self._fail_waiting(RewardError(str(self._failure)))

    @staticmethod
    def _fail_sessions(worker: _Worker, error: RewardError) -> None:
        sessions, worker.sessions = worker.sessions, {}
        for session in sessions.values():
            session.put_nowait(_Lost(error))

    def _fail_waiting(self, error: RewardError) -> None:
        while self._waiting:
            if not (future := self._waiting.popleft()).done():
                future.set_exception(error)

    # -- an episode ----------------------------------------------------------------------------------------------------

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Plays one episode on a worker. If another episode costs that worker, it is played again on the next."""
        replayed = ReplayedPolicy(policy)
        for _ in range(RERUNS):
            try:
                return await self._play(prompt, replayed)
            except _LostError:
                replayed.restart()
        raise RewardError(f"`{self._name}`: {RERUNS} workers were lost to other episodes while they played this one")

    async def _play(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        worker = await self._next_worker()
        id, session = next(self._ids), _Session()
        try:
            worker.send(Play(id, prompt, policy.left, policy.budget_left))
        except Exception as error:  # pickling a row can raise anything
            raise RewardError(f"a row cannot be sent to `{self._name}`: {last_line(error)}") from error
        worker.sessions[id] = session
        worker.begun += 1
        if worker.begun == self._options.max_episodes:
            self._retire(worker)
        try:
            return await self._serve(worker, session, prompt, policy)
        finally:
            if worker.sessions.pop(id, None) is not None:  # the worker does not know yet that it is over
                worker.cancelled[id] = time.monotonic()
                worker.send(Cancel(id))
            worker.end_if_idle()

    async def _serve(self, worker: _Worker, session: _Session, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Does what an episode asks for, until it ends."""
        server = EpisodeServer(prompt, policy)
        while True:
            match await session.get():
                case Ended(_, reward):
                    return reward
                case Failed(_, reason):
                    raise RewardError(reason)
                case _Lost(None):
                    raise _LostError
                case _Lost(error):
                    assert error is not None
                    raise error
                case message:
                    if (reply := await server.serve(message)) is not None:
                        worker.send(reply)

    def _is_blocked(self, worker: _Worker) -> bool:
        """Returns True if an episode seems to block the event loop of a worker."""
        return time.monotonic() - worker.beat > MISSED * self._beat_s

    async def _next_worker(self) -> _Worker:
        """Returns the worker with the fewest episodes, one that is not blocked if there is one.

        Waits while there is none that takes another episode.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closed or not self._tasks:
                raise RewardError(f"`{self._name}` was asked to play an episode while its workers were not running")
            if free := [worker for worker in self._workers if not worker.retiring and not worker.died]:
                return min(free, key=lambda worker: (self._is_blocked(worker), len(worker.sessions)))
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    # -- a worker ------------------------------------------------------------------------------------------------------

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Keeps one worker alive that takes new episodes, until the pool is closed."""
        while True:
            try:
                worker = await self._spawn()
            except RecipeError as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                if not self._workers:
                    self._fail_waiting(RewardError(str(error)))
                await asyncio.sleep(RETRY_S)
                continue
            self._workers.add(worker)
            task = asyncio.create_task(self._tend(worker), name="an episode worker")
            self._tending.add(task)
            task.add_done_callback(self._ended)
            if not ready.done():
                ready.set_result(None)
            while self._waiting:
                if not (future := self._waiting.popleft()).done():
                    future.set_result(None)
            await worker.replaced.wait()

    async def _spawn(self) -> _Worker:
        process = await WorkerProcess.spawn(MODULE, FIRST_MARK, self._worker_options)
        message = (self._options.spec, self._options.tokenizer, self._beat_s)
        try:
            error, wants_close = await process.greeted(message, read_greeting, START_S)
        except GreetingError as failed:
            raise RecipeError(f"`task.environment = {self._name!r}` cannot be used: {failed}") from None
        if error is not None:
            await process.end()
            raise RecipeError(error)
        return _Worker(process, wants_close)

    async def _tend(self, worker: _Worker) -> None:
        """Delivers the messages of a worker until it ends, and then does what its end asks for."""
        code = 0
        try:
            await self._deliver(worker)
        except BrokenFrameError as error:
            worker.died = f"`{self._name}` wrote something else than messages to its pipe ({error})"
        finally:
            worker.process.kill()  # its output or the pool has ended
            self._workers.discard(worker)  # at once: an episode that began there now would fail for no fault of its own
            worker.gone = True
            worker.replaced.set()
            code = await worker.process.ended()
        self._handle_exit(worker, code)

    async def _deliver(self, worker: _Worker) -> None:
        """Hands messages to their episodes until the worker's output ends. Raises `BrokenFrameError` for others."""
        while True:
            try:
                message = read_message(await worker.process.read(lambda: MAX_FRAME))
            except asyncio.IncompleteReadError:
                return
            ends = isinstance(message, Ended | Failed)
            if message.episode in worker.cancelled:
                if ends:
                    del worker.cancelled[message.episode]
                continue
            session = worker.sessions.get(message.episode)
            if session is None:
                raise BrokenFrameError("a message of an episode that the worker does not have")
            if session.qsize() >= MAX_MESSAGES:
                raise BrokenFrameError(f"more than {MAX_MESSAGES} messages of one episode at once")
            if ends:
                del worker.sessions[message.episode]
            session.put_nowait(message)

    def _handle_exit(self, worker: _Worker, code: int) -> None:
        """Fails the episode that cost a worker, or all of its episodes if that is not known."""
        if self._closed:
            self._fail_sessions(worker, self._stopped())
        if not worker.sessions and (worker.retiring or self._closed):
            return
        self.replaced += 1
        marked = worker.step
        died = worker.died or f"`{self._name}` {how_it_ended(code)}"
        known = not worker.bloated and (marked in worker.sessions or marked in worker.cancelled)
        self._notice(f"{died}; a worker with {len(worker.sessions)} episodes is replaced")
        kind = LateRewardError if worker.hung else RewardError
        sessions, worker.sessions = worker.sessions, {}
        for id, session in sessions.items():
            if known and id != marked:
                session.put_nowait(_Lost(None))
            elif known:
                session.put_nowait(_Lost(kind(f"{died} in this episode")))
            else:
                session.put_nowait(_Lost(kind(f"{died}, with {len(sessions)} episodes in progress")))

    def _retire(self, worker: _Worker, why: str = "") -> None:
        """Replaces a worker once its episodes have ended. `why` is said if somebody should know."""
        if worker.retiring:
            return
        if why:
            self._notice(
                f"`{self._name}`: {why}; a worker is replaced after the {len(worker.sessions)} episodes it has"
            )
        self.retired += 1
        worker.retire()

    async def _watch(self) -> None:
        """Kills workers that hang or take too much memory, and replaces those that leak."""
        limit = self._options.max_bytes
        while True:
            await asyncio.sleep(self._beat_s)
            late = time.monotonic() - self._options.hang_s
            for worker in [each for each in self._workers if not each.died]:
                memory = worker.memory
                if (worker.sessions or worker.cancelled or worker.closing) and worker.beat < late:
                    worker.hung = True
                    worker.died = (
                        f"`{self._name}` blocked the event loop of its worker for {self._options.hang_s:g} s "
                        f"({self._options.hang_reason}): await, or call what blocks in `asyncio.to_thread`"
                    )
                elif limit is not None and memory > 2 * limit:
                    worker.bloated = True
                    worker.died = (
                        f"`{self._name}` took {memory / 2**30:.1f} GiB, more than twice `task.worker_gib = "
                        f"{limit / 2**30:g}`"
                    )
                elif limit is not None and memory > limit:
                    self._retire(worker)
                elif any(at < late for at in worker.cancelled.values()):  # it may hold what others need
                    self._retire(worker, f"an episode goes on {self._options.hang_s:g} s after it was cancelled")
                elif worker.hanging_calls >= MAX_HANGING:
                    self._retire(worker, f"{worker.hanging_calls} calls of tools hang: give them a deadline")
                if worker.died:
                    worker.process.kill()


def pickled_tokenizer(tokenizer: Any) -> bytes:
    """Returns a tokenizer as workers get it. Raises `RecipeError` if it cannot be sent."""
    try:
        return pickle.dumps(tokenizer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RecipeError(
            f"the tokenizer cannot be sent to a worker process: {last_line(error)}; `task.workers = 0` plays episodes "
            "in this process"
        ) from error
