"""Ends a run in which nothing happens any more, with an error that says what waits for what.

Not a stall, however long it takes: an instance that generates tokens or is being made, an evaluation whose episodes
end one after the other, and an update or a reward within its own deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stretto.core.controller import Controller
from stretto.errors import StalledError
from stretto.run.evaluation import Evaluator
from stretto.run.rollout_runner import Rollouts


class StallWatchdog:
    """Raises `StalledError` if neither `note_event` is called nor a token generated for too long."""

    def __init__(
        self,
        controller: Controller,
        rollouts: Rollouts,
        evaluator: Evaluator | None,
        *,
        stall_s: float,
        reward_s: float,
        scoring_wait: Callable[[], str] = lambda: "",
    ) -> None:
        """`scoring_wait` returns what scoring waits for, or an empty text."""
        self._controller = controller
        self._rollouts = rollouts
        self._evaluator = evaluator
        self._stall_s, self._reward_s = stall_s, reward_s
        self._scoring_wait = scoring_wait
        self.note_event()

    def note_event(self) -> None:
        """Notes that something happened."""
        self._last_event_at = time.monotonic()

    async def watch(self) -> None:
        """Raises `StalledError` once nothing has happened for too long."""
        self.note_event()
        before = self._progress()
        while True:
            left_s = self._stall_s - (time.monotonic() - self._last_event_at)
            if left_s <= 0 and (self._rollouts.environment_works or self._controller.evaluating is not None):
                # An environment is ended after `stall_s`, a reward after `reward_s`: that deadline comes before this.
                left_s += self._stall_s + self._reward_s
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            progress = self._progress()
            instances = self._rollouts.instances
            if progress == before and self._controller.training is None and not instances.is_expecting:
                waits = [f"{wait.owner}: {wait.reason}" for wait in self._controller.waits()]
                if scoring := self._scoring_wait():
                    waits.append(f"rewards: {scoring}")
                reasons = "; ".join(waits)
                raise StalledError(
                    f"nothing happened for {self._stall_s:g} s (`runtime.stall_seconds`). {reasons}. "
                    + " ".join(f"Instance {id}: {engine.report()}." for id, engine in instances.engines.items())
                )
            before = progress
            self.note_event()

    def _progress(self) -> int:
        """Counts tokens, and episodes of evaluations: neither comes with an event."""
        tokens = sum(load.tokens + load.prefilled for load in self._rollouts.instances.reports())
        return tokens + (0 if self._evaluator is None else self._evaluator.num_ended)
