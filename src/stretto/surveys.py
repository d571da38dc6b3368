"""How far trajectories are and what instances are short of, without asking anybody: from what engines report anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stretto.core import messages as core
from stretto.core.migration import MoveRates
from stretto.flight import Flight
from stretto.instances import Instances
from stretto.types import Load

CROWDED_SHARE = 0.9  # of an instance's KV; above, what is queued there waits for memory
ENDING_SHARE = 0.05  # of `max_tokens`; what has no more left than this is not worth moving


class Surveys:
    """Over the trajectories that are `under_way`. For the loop's thread only."""

    def __init__(self, under_way: Mapping[int, Flight], instances: Instances, max_tokens: int) -> None:
        self.rates = MoveRates()  # of moving and prefilling
        self._under_way = under_way
        self._instances = instances
        self._max_tokens = max_tokens
        self._last: dict[int, Load] = {}  # what each instance said at the last survey
        self._prefill_rate = 0.0  # the fastest that was seen

    def contexts(self, flights: Iterable[Flight], load: Load) -> dict[int, int]:
        """About how many tokens of context each has: every running row makes one a step."""
        return {
            flight.id: min(
                flight.context + (0 if flight.between_turns else max(0, load.steps - flight.steps)),
                len(flight.prompt.tokens) + self._max_tokens,
            )
            for flight in flights
        }

    def survey(self) -> core.Surveyed:
        """How far what runs is, and who is short of KV memory; the rates of prefilling follow from it."""
        tokens: dict[int, int] = {}
        now = {instance: engine.report() for instance, engine in self._instances.engines.items()}
        for flight in self._under_way.values():
            if flight.instance in now and flight.call is not None and flight.completion is None:
                tokens |= self.contexts([flight], now[flight.instance])
        crowded = frozenset(instance for instance, load in now.items() if self._is_crowded(instance, load))
        for instance, load in now.items():
            if (before := self._last.get(instance)) is not None:
                self._measure_prefill(before, load)
        self._last = now
        ending = frozenset(
            id
            for id, context in tokens.items()
            if len(self._under_way[id].prompt.tokens) + self._max_tokens - context <= ENDING_SHARE * self._max_tokens
        )
        return core.Surveyed(tokens, crowded, ending)

    def _is_crowded(self, instance: int, load: Load) -> bool:
        """Whether something waits there for KV memory, or had to give some back since the last survey."""
        if load.queued and load.kv_tokens > CROWDED_SHARE * self._instances.engines[instance].capacity.kv_tokens:
            return True
        before = self._last.get(instance)
        return before is not None and load.preemptions > before.preemptions

    def _measure_prefill(self, before: Load, load: Load) -> None:
        """Decoding shares that time, so the fastest that was seen is the nearest to the truth."""
        prefilled, busy_s = load.prefilled - before.prefilled, load.busy_s - before.busy_s
        if busy_s > 0 and prefilled / busy_s > self._prefill_rate:
            self._prefill_rate = prefilled / busy_s
            self.rates = replace(self.rates, prefill_tokens_per_s=self._prefill_rate)
