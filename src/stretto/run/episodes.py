"""One run of an episode: one turn at a time, a deadline while its environment works, and nothing left behind it.

A `SingleTurn` environment takes a direct path: its only turn is generated here, and then it scores. No code of a user
runs before the turn is done, so the turn needs no task, no deadline and no check of what an environment does with it.

Any other environment runs in a task of its own, so the task that it may cancel is that of its episode alone.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stretto.environments.episode_faults import asked_after_end, asked_early, contained, given_up, in_own_task
from stretto.environments.grades import Grade
from stretto.environments.protocol import Environment, Outcome, token_ids
from stretto.environments.single_turn import SingleTurn
from stretto.environments.spending import Spending
from stretto.errors import LateRewardError, RewardError
from stretto.run.turns import Turns
from stretto.types import Completion, Prompt

TakeTurn = Callable[[int, tuple[int, ...], int, bool], Coroutine[Any, Any, Completion]]
"""Returns the turn of this number behind this context, of this lineage, which is trained on or not."""


class Episode:
    """The policy that an environment asks for its turns. When `play` is over, no turn is in progress any more."""

    __slots__ = ("_clock_since", "_cuts", "_deadline_s", "_direct", "_limit", "_max_context", "_max_tokens", "_over",
                 "_process", "_reported", "_seconds", "_seconds_left", "_take_turn", "_turn", "_turns", "cut", "fault",
                 "num_asked", "spending")  # fmt: skip

    def __init__(
        self,
        turns: Turns,
        take_turn: TakeTurn,
        *,
        max_tokens: int,
        deadline_s: float | None,
        max_context: int | None = None,
        seconds: float | None = None,
        budget: float = math.inf,
    ) -> None:
        """`turns` are those that are done, which `take_turn` adds to; `max_tokens` bounds what follows the prompt.

        `max_context` bounds a lineage with a context of its own, which is included.
        `deadline_s`: of the environment, while it waits for no token. None: whatever it waits for has a deadline.
        `seconds`: after which it is cut, summed over all times in which it waits for no token; None: it is not.
        `budget`: that it may spend.
        """
        self.cut = False  # it was cancelled after `seconds`
        self.spending = Spending(budget)
        self.num_asked = 0  # turns that this run of the episode has had
        self.fault: Exception | None = None  # why it failed, if that is not for the environment to handle
        self._turns = turns
        self._take_turn = take_turn
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._deadline_s = deadline_s
        self._turn: asyncio.Task[Completion] | None = None  # the last that the environment asked for
        self._direct = False  # the only turn of a `SingleTurn` environment is in progress
        self._over = False
        self._limit = asyncio.Timeout(None)
        self._seconds = seconds
        self._seconds_left = math.inf if seconds is None else seconds
        self._clock_since = 0.0
        self._cuts = False  # the limit that comes next is that of `seconds`
        self._reported: float | Outcome | None = None
        self._process = os.getpid()

    @property
    def left(self) -> int:
        """Tokens that may still follow in lineage 0, observed or sampled. For the environment."""
        return self._turns.left(self.num_asked, max_tokens=self._max_tokens, max_context=self._max_context)

    @property
    def budget_left(self) -> float:
        """The amount that may still be spent. For the environment."""
        return self.spending.left

    def spend(self, amount: float, what: str = "") -> None:
        """Counts an amount. Raises `BudgetError` if there is less left. For the environment."""
        self.spending.spend(amount, what)

    def report(self, reward: float | Outcome) -> None:
        """Keeps the reward so far. For the environment."""
        self._reported = reward

    @property
    def environment_works(self) -> bool:
        """True while the environment does anything but wait for tokens."""
        return not (self._over or self._direct or self._turn_in_progress)

    async def play(self, environment: Environment, prompt: Prompt) -> float | Outcome | Grade:
        """Runs the episode to its end. An error that kept it from a turn is raised, whatever the environment did."""
        if not isinstance(environment, SingleTurn):
            return await self._bounded(in_own_task(self._played(environment, prompt)))
        self._direct = True
        try:
            completion = await self._take_turn(0, prompt.tokens, 0, True)
        except Exception as error:
            self.fault = error
            raise
        finally:
            self._direct = False
        self.num_asked = 1
        return await self._bounded(environment.score(prompt, completion))

    async def _played(self, environment: Environment, prompt: Prompt) -> float | Outcome | Grade:
        try:
            return await environment.episode(prompt, self)
        finally:
            self._end_forked_process()

    def _end_forked_process(self) -> None:
        """Ends a process that the environment forked and that came back here: it would be a second driver."""
        if os.getpid() != self._process:
            os._exit(1)

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        """Returns the next turn. For the environment, which may handle a `RewardError` of it, and no other error."""
        self._end_forked_process()
        context = token_ids(tokens)
        if self._over:
            raise asked_after_end()
        if self._turn_in_progress:
            self.fault = asked_early()
            raise self.fault
        self._stop_clock()
        self._turn = asyncio.create_task(self._take_turn(self.num_asked, context, lineage, bool(train)), name="turn")
        try:
            completion = await self._turn
        except RewardError:
            raise
        except asyncio.CancelledError:
            if not self._over:
                self.fault = self.fault or given_up()
            raise
        except Exception as error:
            self.fault = error
            raise
        finally:
            if not self._over:
                self._limit.reschedule(self._start_clock())
        self.num_asked += 1
        return completion

    @property
    def _turn_in_progress(self) -> bool:
        return self._turn is not None and not self._turn.done()

    async def _bounded(self, work: Coroutine[Any, Any, float | Outcome | Grade]) -> float | Outcome | Grade:
        """Awaits the environment's `work` within its deadline."""
        try:
            async with asyncio.timeout_at(self._start_clock()) as self._limit:
                try:
                    outcome = await contained(work)
                    if self._turn_in_progress:
                        self.fault = self.fault or given_up()
                finally:
                    await self._end()
        except Exception as error:
            if self.fault is not None:
                raise self.fault from None
            if isinstance(error, TimeoutError) and self._limit.expired():
                if self._cuts:
                    return self._cut_short()
                since = "its last token" if self.num_asked or self._turn is not None else "it began"
                raise LateRewardError(
                    f"the environment has not returned for {self._deadline_s:g} s since {since} "
                    "(`runtime.stall_seconds`)"
                ) from error
            raise
        if self.fault is not None:
            raise self.fault
        return outcome

    def _start_clock(self) -> float | None:
        """Notes that the environment works from now on. Returns when it must be done; None: it has no limit."""
        self._clock_since = asyncio.get_running_loop().time()
        within_s = math.inf if self._deadline_s is None else self._deadline_s
        self._cuts = self._seconds_left <= within_s
        within_s = min(within_s, self._seconds_left)
        return None if math.isinf(within_s) else self._clock_since + within_s

    def _stop_clock(self) -> None:
        """Notes that the environment waits for tokens."""
        self._seconds_left -= asyncio.get_running_loop().time() - self._clock_since
        self._limit.reschedule(None)

    def _cut_short(self) -> float | Outcome:
        """Returns the reward of an episode that is cut after its seconds. Turns after the last report earned nothing.

        Raises `LateRewardError` if it has no turn, or the environment has reported no reward.
        """
        self.cut = True
        said = f"the episode was cut after `task.episode_seconds = {self._seconds:g}`"
        if not self.num_asked:
            raise LateRewardError(f"{said}, before it had a turn")
        if self._reported is None:
            raise LateRewardError(f"{said}, and has no reward: call `policy.report(reward)` with what it earned so far")
        if isinstance(self._reported, Outcome):
            missing = self.num_asked - len(self._reported.turns)
            return Outcome((*self._reported.turns, *[0.0] * missing))
        return self._reported

    async def _end(self) -> None:
        """Takes a turn that is not awaited any more out of its engine, so that the next attempt may ask for it."""
        self._over = True
        if self._turn is not None and self._turn_in_progress:
            self._turn.cancel()
            await asyncio.wait([self._turn])
