"""One run of an episode: one turn at a time, a deadline while its environment works, and nothing left behind it.

A `SingleTurn` environment takes a direct path: its only turn is generated here, and then it scores. No code of a user
runs before the turn is done, so the turn needs no task, no deadline and no check of what an environment does with it.

Any other environment runs in a task of its own, so the task that it may cancel is that of its episode alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stretto.environments.function_specs import last_line
from stretto.environments.protocol import Environment, Outcome
from stretto.environments.single_turn import SingleTurn
from stretto.errors import LateRewardError, RewardError
from stretto.run.turns import Turns, token_ids
from stretto.types import Completion, Prompt

TakeTurn = Callable[[int, tuple[int, ...], int, bool], Coroutine[Any, Any, Completion]]
"""Returns the turn of this number behind this context, of this lineage, which is trained on or not."""


class Episode:
    """The policy that an environment asks for its turns. When `play` is over, no turn is in progress any more."""

    __slots__ = ("_deadline_s", "_direct", "_limit", "_max_context", "_max_tokens", "_over", "_process", "_take_turn",
                 "_turn", "_turns", "fault", "num_asked")  # fmt: skip

    def __init__(
        self,
        turns: Turns,
        take_turn: TakeTurn,
        *,
        max_tokens: int,
        deadline_s: float | None,
        max_context: int | None = None,
    ) -> None:
        """`turns` are those that are done, which `take_turn` adds to; `max_tokens` bounds what follows the prompt.

        `max_context` bounds a lineage with a context of its own, which is included.
        `deadline_s`: of the environment, while it waits for no token. None: whatever it waits for has a deadline.
        """
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
        self._process = os.getpid()

    @property
    def left(self) -> int:
        """Tokens that may still follow in lineage 0, observed or sampled. For the environment."""
        return self._turns.left(self.num_asked, max_tokens=self._max_tokens, max_context=self._max_context)

    @property
    def environment_works(self) -> bool:
        """True while the environment does anything but wait for tokens."""
        return not (self._over or self._direct or self._turn_in_progress)

    async def play(self, environment: Environment, prompt: Prompt) -> float | Outcome:
        """Runs the episode to its end. An error that kept it from a turn is raised, whatever the environment did."""
        if not isinstance(environment, SingleTurn):
            return await self._bounded(_in_own_task(self._played(environment, prompt)))
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

    async def _played(self, environment: Environment, prompt: Prompt) -> float | Outcome:
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
            raise RewardError("the environment asked for a turn, and its episode had ended: await every turn in it")
        if self._turn_in_progress:
            self.fault = RewardError(
                "the environment asked for a turn before the last one was done: await one after the other"
            )
            raise self.fault
        self._limit.reschedule(None)
        self._turn = asyncio.create_task(self._take_turn(self.num_asked, context, lineage, bool(train)), name="turn")
        try:
            completion = await self._turn
        except RewardError:
            raise
        except asyncio.CancelledError:
            if not self._over:
                self.fault = self.fault or _given_up()
            raise
        except Exception as error:
            self.fault = error
            raise
        finally:
            if self._deadline_s is not None and not self._over:
                self._limit.reschedule(asyncio.get_running_loop().time() + self._deadline_s)
        self.num_asked += 1
        return completion

    @property
    def _turn_in_progress(self) -> bool:
        return self._turn is not None and not self._turn.done()

    async def _bounded(self, work: Coroutine[Any, Any, float | Outcome]) -> float | Outcome:
        """Awaits the environment's `work` within its deadline."""
        try:
            async with asyncio.timeout(self._deadline_s) as self._limit:
                try:
                    outcome = await _contained(work)
                    if self._turn_in_progress:
                        self.fault = self.fault or _given_up()
                finally:
                    await self._end()
        except Exception as error:
            if self.fault is not None:
                raise self.fault from None
            if isinstance(error, TimeoutError) and self._limit.expired():
                since = "its last token" if self.num_asked or self._turn is not None else "it began"
                raise LateRewardError(
                    f"the environment has not returned for {self._deadline_s:g} s since {since} "
                    "(`runtime.stall_seconds`)"
                ) from error
            raise
        if self.fault is not None:
            raise self.fault
        return outcome

    async def _end(self) -> None:
        """Takes a turn that is not awaited any more out of its engine, so that the next attempt may ask for it."""
        self._over = True
        if self._turn is not None and self._turn_in_progress:
            self._turn.cancel()
            await asyncio.wait([self._turn])


async def _in_own_task(work: Coroutine[Any, Any, float | Outcome]) -> float | Outcome:
    """Returns what an environment returns. Whatever it does to the current task, the caller's is untouched."""
    try:
        return await asyncio.create_task(_contained(work), name="episode")
    finally:
        work.close()  # if the task was cancelled before it began


async def _contained(work: Coroutine[Any, Any, float | Outcome]) -> float | Outcome:
    """Returns what an environment returns. If it would end the process or cancel the run, only its episode fails."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RewardError(
            "the environment raised `CancelledError`, and nobody had cancelled it: it cancelled its own task, or "
            "something that it awaited was cancelled"
        ) from error
    except SystemExit as error:
        raise RewardError(f"the environment called `sys.exit({error.code!r})`: raise an error instead") from error
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise RewardError(
            f"the environment raised `{last_line(error)}`, which is not an `Exception`: raise one that is"
        ) from error


def _given_up() -> RewardError:
    return RewardError(
        "the environment gave up a turn that it had asked for, or returned before that was done: await every turn to "
        "its end, without a deadline of your own"
    )
