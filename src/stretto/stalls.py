"""A run in which nothing happens any more ends with an error that says who waits for what.

No stall is an instance that makes tokens or is being made, an evaluation whose episodes end one after the other, or an
update or a reward within its own deadline, however long they take.
"""

from __future__ import annotations

import asyncio
import time

from stretto.core.brain import Brain
from stretto.errors import StalledError
from stretto.evaluation import Evaluator
from stretto.flights import Flights


class Stalls:
    """Is told whenever something has `moved`."""

    def __init__(
        self, brain: Brain, flights: Flights, evaluator: Evaluator | None, *, stall_s: float, reward_s: float
    ) -> None:
        self._brain = brain
        self._flights = flights
        self._evaluator = evaluator
        self._stall_s, self._reward_s = stall_s, reward_s
        self.moved()

    def moved(self) -> None:
        """Something happened that a run lives by."""
        self._moved_at = time.monotonic()

    async def watch(self) -> None:
        """Raise `StalledError` once nothing has happened for too long."""
        self.moved()
        before = self._made()
        while True:
            left_s = self._stall_s - (time.monotonic() - self._moved_at)
            if left_s <= 0 and (self._flights.scores or self._brain.evaluating is not None):
                # Whoever is at it ends it after `stall_s` or `reward_s`, so that deadline has come before this one.
                left_s += self._stall_s + self._reward_s
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            made = self._made()
            instances = self._flights.instances
            if made == before and self._brain.training is None and not instances.coming:
                reasons = "; ".join(f"{wait.owner}: {wait.reason}" for wait in self._brain.waits())
                raise StalledError(
                    f"nothing happened for {self._stall_s:g} s (`runtime.stall_seconds`). {reasons}. "
                    + " ".join(f"Instance {id}: {engine.report()}." for id, engine in instances.engines.items())
                )
            before = made
            self.moved()

    def _made(self) -> int:
        """Tokens, and episodes of evaluations: what comes without an event."""
        tokens = sum(load.tokens + load.prefilled for load in self._flights.reports())
        return tokens + (0 if self._evaluator is None else self._evaluator.num_ended)
