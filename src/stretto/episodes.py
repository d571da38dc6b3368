"""One run of an episode: one turn at a time, a deadline while its environment is at it, and nothing left behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from stretto.environments.protocol import Environment, Outcome, Policy
from stretto.errors import RewardError
from stretto.types import Completion, Prompt


class Episode:
    """What an environment asks for its turns through. When `play` is over, no turn is under way any more."""

    __slots__ = ("_deadline_s", "_over", "_turn", "fault", "limit")

    def __init__(self, deadline_s: float | None) -> None:
        """`deadline_s`: of the environment, while it waits for no token. None: what it waits for has its own."""
        self._deadline_s = deadline_s
        self._turn: asyncio.Task[Completion] | None = None  # the last that was asked for
        self._over = False
        self.limit = asyncio.Timeout(None)
        self.fault: Exception | None = None  # why it cannot go on, where that is not for the environment to judge

    @property
    def works(self) -> bool:
        """Whether the environment is at something else than to wait for tokens."""
        return not (self._over or self._asking)

    async def play(self, environment: Environment, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Run it to its end. What kept it from its tokens is raised, whatever the environment made of that."""
        try:
            async with asyncio.timeout(self._deadline_s) as self.limit:
                try:
                    outcome = await _outcome(environment, prompt, policy)
                    if self._asking:
                        self.fault = self.fault or _given_up()
                finally:
                    await self._end()
        except Exception as error:
            if self.fault is not None:
                raise self.fault from None
            if isinstance(error, TimeoutError) and self.limit.expired():
                since = "it began" if self._turn is None else "its last token"
                raise RewardError(
                    f"the environment has not returned for {self._deadline_s:g} s since {since} "
                    "(`runtime.stall_seconds`)"
                ) from error
            raise
        if self.fault is not None:
            raise self.fault
        return outcome

    async def ask(self, work: Callable[[], Coroutine[Any, Any, Completion]]) -> Completion:
        """Have `work` make the next turn; a `RewardError` of it is for the environment to judge, and nothing else."""
        if self._over:
            raise RewardError("the environment asked for a turn, and its episode had ended: await every turn in it")
        if self._asking:
            self.fault = RewardError(
                "the environment asked for a turn before the last one was done: await one after the other"
            )
            raise self.fault
        self.limit.reschedule(None)
        self._turn = asyncio.create_task(work(), name="turn")
        try:
            return await self._turn
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
                self.limit.reschedule(asyncio.get_running_loop().time() + self._deadline_s)

    @property
    def _asking(self) -> bool:
        return self._turn is not None and not self._turn.done()

    async def _end(self) -> None:
        """A turn that nobody awaits any more is taken out of its engine, so that the next try may ask for it."""
        self._over = True
        if self._turn is not None and self._asking:
            self._turn.cancel()
            await asyncio.wait([self._turn])


async def _outcome(environment: Environment, prompt: Prompt, policy: Policy) -> float | Outcome:
    """What it returns. What would end the process, or pass for the run's own cancelling, fails the episode alone."""
    try:
        return await environment.episode(prompt, policy)
    except SystemExit as error:
        raise RewardError(f"the environment called `sys.exit({error.code!r})`: raise an error instead") from error
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RewardError(
            "the environment raised `CancelledError`, and nobody had cancelled it: something that it awaited was"
        ) from error


def _given_up() -> RewardError:
    return RewardError(
        "the environment gave up a turn that it had asked for, or returned before that was done: await every turn to "
        "its end, without a deadline of your own"
    )
