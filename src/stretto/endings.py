"""Trajectories that end without being trained on: failed for good, dropped, filtered. Each is recorded and counted."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.core.plan import Plan
from stretto.errors import StalledError
from stretto.flights import Flights
from stretto.observe.metrics import Tally
from stretto.observe.repeats import Repeats
from stretto.observe.tail import Tail
from stretto.store.journal import Journal

log = logging.getLogger(__name__)

HOPELESS = 64  # trajectories at least that fail in a row before a run gives up


class Endings:
    """Carries out what the core says of them. For the loop's thread only."""

    def __init__(self, plan: Plan, flights: Flights, *, journal: Journal, tally: Tally, tail: Tail) -> None:
        self._plan = plan
        self._flights = flights
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._failures = Repeats(log)

    def fail(self, command: core.Fail) -> None:
        """Raises `StalledError` where nothing but failures came for too long."""
        flight = self._flights.under_way.pop(command.trajectory)
        self._tally.failed(flight.num_sampled)
        lost = flight.num_sampled if flight.completion is None else 0
        self._journal.failed(flight.id, command.reason, at=clock.now(), num_tokens=lost)
        self._tail.member_ended(flight.group, scored=False)
        self._failures.warn(f"trajectory {flight.id} failed for good: {command.reason}")
        self._flights.failed_for_good(flight)
        if self._flights.failed_in_a_row >= max(HOPELESS, 4 * self._plan.batch * self._plan.group_size):
            # Groups that fail are replaced, so a reward that can only fail would draw prompts for ever.
            raise StalledError(
                f"the last {self._flights.failed_in_a_row} trajectories all failed, and none got a reward in "
                f"between; the last of them: {command.reason}"
            )

    def drop(self, command: core.Drop) -> Coroutine[Any, Any, None]:
        """They are called back at once; what is returned records how far each had come."""
        self._tail.dropped(command.group)
        under_way = self._flights.under_way
        return self._flights.discard([under_way.pop(id) for id in command.trajectories if id in under_way])

    def filter(self, command: core.Filter) -> None:
        """A group without a signal."""
        flights = [self._flights.under_way.pop(id) for id in command.trajectories]
        reason = f"no signal: every reward of the group is {flights[0].reward:g}"
        for flight in flights:
            self._journal.filtered(flight.id, reason, at=clock.now())
        lengths = [flight.num_sampled for flight in flights]
        self._tally.filtered(lengths, flights[0].reward or 0.0)

    def spare(self, command: core.Spare) -> None:
        """A group that would be filtered if not too many had been; it is trained."""
        text = (
            f"group {command.group} has no signal and is trained as it is: {self._plan.filter_limit} groups "
            f"(`rollout.filter_limit`) were filtered before update {command.update}, and hardly any had a signal"
        )
        self._journal.group_spared(command.group, command.update, text, at=clock.now())
        self._failures.warn(text)

    def close(self) -> None:
        """Say how often what was said once came again."""
        self._failures.close()
