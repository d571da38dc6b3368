"""Plays the episodes of an environment that was given from Python, on an event loop in a thread of this process.

Such an environment cannot be imported by a worker process (`episode_pool.py`). In a thread of its own, an episode that
blocks does not block the run, though it shares the interpreter with engine and trainer.

- The environment asks for its turns from its own event loop; they are generated on that of the run.
- If its event loop answers nothing for `hang_s`, the thread is abandoned: its episodes fail with `LateRewardError` and
  are tried again in a new thread, with a new environment if a class was given, else with the same object. Nothing waits
  for the old one, not even the end of the process.
- `MOST_ABANDONED` threads that hang at once are the limit. Until one of them returns, every further episode fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from stretto.environments.custom import close_environment, start_environment
from stretto.environments.episode_faults import in_own_task
from stretto.environments.protocol import Environment, Outcome, Policy
from stretto.errors import LateRewardError, RewardError
from stretto.types import Completion, Prompt

MOST_ABANDONED = 16
START_S = 120.0  # for `async def start(self)` of an environment that replaces another
CLOSE_S = 10.0  # for `async def close(self)`
CHECKS = 10  # of the event loop within `hang_s`


class _RemotePolicy:
    """The policy of an episode, for the thread of the environment."""

    def __init__(self, policy: Policy, home: asyncio.AbstractEventLoop) -> None:
        self._policy = policy
        self._home = home

    @property
    def left(self) -> int:
        return self._policy.left

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        asked = self._policy.generate(tokens, lineage=lineage, train=train)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._home))

    @property
    def budget_left(self) -> float:
        return self._policy.budget_left

    def spend(self, amount: float, what: str = "") -> None:
        self._policy.spend(amount, what)

    def report(self, reward: float | Outcome) -> None:
        self._policy.report(reward)


class _Stage:
    """One environment with its event loop and thread."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        self.answers: set[asyncio.Future[float | Outcome]] = set()  # of the run's event loop
        self.answered_at = time.monotonic()
        self._asked = False
        self.thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def ask(self) -> None:
        """Asks the event loop for a sign of life."""
        if not self._asked:
            self._asked = True
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._asked = False
        self.answered_at = time.monotonic()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class ThreadEpisodes:
    """Plays episodes as the environment that `make` returns, in a thread of its own."""

    def __init__(self, make: Callable[[], Environment], *, hang_s: float, most_abandoned: int = MOST_ABANDONED) -> None:
        """Makes the first environment, in this thread. `hang_s`: see above."""
        self._make = make
        self._hang_s = hang_s
        self._most_abandoned = most_abandoned
        self._first: Environment | None = make()
        self._stage: _Stage | None = None
        self._abandoned: list[_Stage] = []
        self._replacing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_abandoned(self) -> int:
        """Threads that were abandoned and still hang."""
        self._abandoned = [stage for stage in self._abandoned if stage.thread.is_alive()]
        return len(self._abandoned)

    async def start(self) -> None:
        """Starts the thread, and the environment in it."""
        first, self._first = self._first, None
        self._stage = await self._started(first or self._make())
        self._watching = asyncio.create_task(self._watch(), name="watch the environment")

    async def close(self) -> None:
        """Closes the environment, within a deadline, and ends its thread. Safe to call twice."""
        self._closed = True
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        stage, self._stage = self._stage, None
        if stage is not None:
            closing = asyncio.run_coroutine_threadsafe(close_environment(stage.environment), stage.loop)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(closing), CLOSE_S)
            stage.end()

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Runs one episode in the environment's thread. A cancelled one is not waited for."""
        async with self._replacing:
            stage = self._stage
        if stage is None:
            hang = f"{self.num_abandoned} threads of the environment hang" if self._abandoned else "it is not running"
            raise RewardError(f"the environment cannot play an episode: {hang}")
        remote = _RemotePolicy(policy, asyncio.get_running_loop())
        playing = asyncio.run_coroutine_threadsafe(in_own_task(stage.environment.episode(prompt, remote)), stage.loop)
        answer: asyncio.Future[float | Outcome] = asyncio.get_running_loop().create_future()
        stage.answers.add(answer)
        playing.add_done_callback(partial(_answer_from_thread, answer))
        try:
            return await answer
        finally:
            stage.answers.discard(answer)
            playing.cancel()  # does nothing if it has ended

    async def _started(self, environment: Environment) -> _Stage:
        stage = _Stage(environment)
        try:
            starting = asyncio.run_coroutine_threadsafe(start_environment(environment), stage.loop)
            await asyncio.wrap_future(starting)
        except BaseException:
            stage.end()
            raise
        return stage

    async def _watch(self) -> None:
        """Replaces the thread if its event loop answers nothing."""
        while True:
            await asyncio.sleep(self._hang_s / CHECKS)
            stage = self._stage
            if stage is None:
                if self.num_abandoned < self._most_abandoned:
                    await self._replace(None)
            elif not stage.answers:
                stage.answered_at = time.monotonic()
            else:
                stage.ask()
                if time.monotonic() - stage.answered_at > self._hang_s:
                    await self._replace(stage)

    async def _replace(self, stage: _Stage | None) -> None:
        async with self._replacing:
            self._stage = None
            if stage is not None:
                self._abandoned.append(stage)
                stage.end()  # if it ever answers again
                error = LateRewardError(
                    f"the environment has blocked its thread for {self._hang_s:g} s: await, or use `asyncio.to_thread`"
                )
                for answer in stage.answers:
                    if not answer.done():
                        answer.set_exception(error)
            if self._closed or self.num_abandoned >= self._most_abandoned:
                return
            with contextlib.suppress(Exception):  # the next check tries again; episodes fail until then
                environment = await asyncio.to_thread(self._make)
                self._stage = await asyncio.wait_for(self._started(environment), START_S)


def _answer_from_thread(answer: asyncio.Future[float | Outcome], playing: Future[float | Outcome]) -> None:
    """Passes the result of an episode on to the run's event loop, which may be closed by now."""

    def pass_on() -> None:
        if answer.done():
            return
        if playing.cancelled():
            answer.cancel()
        elif (error := playing.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(playing.result())

    with contextlib.suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(pass_on)
