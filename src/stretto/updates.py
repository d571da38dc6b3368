"""Updates from the batch to the weights that it made, and what the trainer waited for before each.

Decides nothing: the core says which trajectories are the batch, and is told when they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.core.waits import Wait
from stretto.flight import Flight
from stretto.flights import Flights
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer
from stretto.observe.tail import Tail
from stretto.runtime.roles import TrainerSeat
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.types import Batch, Sample, Weights


class Updates:
    """The trainer's side of a run. For the loop's thread only."""

    def __init__(
        self,
        trainer: TrainerSeat,
        flights: Flights,
        weights: dict[int, Weights],
        *,
        kept: Mapping[int, Flight] | None,
        journal: Journal,
        tally: Tally,
        tail: Tail,
        observer: Observer,
        post: Callable[[core.Event], None],
        versions: VersionFiles | None = None,
    ) -> None:
        """`kept` are trained trajectories that may be used again; None: none ever is."""
        self.free_at = 0.0  # since when the trainer has nothing to do
        self._replays = kept is not None
        self._kept: dict[int, Flight] = dict(kept or {})
        self._trainer = trainer
        self._flights = flights
        self._weights = weights  # the weight store: a new version is put into it
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._observer = observer
        self._post = post
        self._versions = versions
        self._waits_for = ""  # why the next update has not begun

    def note_wait(self, waits: Sequence[Wait]) -> None:
        """Keep why the trainer waits until the update that it waits for begins."""
        self._waits_for = next((wait.reason for wait in waits if wait.owner == "trainer"), self._waits_for)

    def begin(self, command: core.Train) -> Coroutine[Any, Any, None]:
        """The update as a task, with what was waited for until now. The batch is recorded in the order of decisions."""
        waited_for, self._waits_for = self._waits_for, ""
        uses = [0] * len(command.trajectories) + [use for _, use in command.again]
        ids = [*command.trajectories, *(id for id, _ in command.again)]
        self._journal.batch_taken(command.update, ids, at=clock.now(), uses=uses)
        return self._update(command, waited_for)

    def forget(self, trajectories: Sequence[int]) -> None:
        """These are not used again."""
        for id in trajectories:
            del self._kept[id]

    async def _update(self, command: core.Train, waited_for: str) -> None:
        flights = [self._flights.under_way[id] for id in command.trajectories]
        samples = [_sample(flight, 0) for flight in flights]
        samples += [_sample(self._kept[id], use) for id, use in command.again]
        idle_s = clock.now() - self.free_at
        await self._journal.durable()
        started = clock.now()
        report, weights = await self._trainer.update(Batch(command.update, samples))
        ended = clock.now()

        self._weights[weights.version] = weights
        for flight in flights:
            del self._flights.under_way[flight.id]
            if self._replays:
                self._kept[flight.id] = flight
        if self._versions is not None:
            self._versions.write(weights)  # durable before an engine loads it
        self._tail.updated(ended - started)
        line = self._tally.trained(samples, report, started=started, ended=ended, idle_s=idle_s, waited_for=waited_for)
        loads = self._flights.reports()
        totals = self._tally.carried(loads, ended).sums()
        self._journal.update_done(command.update, line, at=ended, checksum=weights.checksum, totals=totals)
        self._observer.updated(line)
        self.free_at = ended
        self._tally.mark(loads, ended)
        self._post(core.Updated(command.update))
        if (measured := self._tail.measure()) is not None:
            self._post(core.Measured(*measured))


def _sample(flight: Flight, use: int) -> Sample:
    assert flight.completion is not None, flight
    assert flight.reward is not None, flight
    return Sample(
        flight.id, flight.group, flight.version, flight.prompt.tokens, flight.completion, flight.reward, use,
        turn_rewards=flight.turn_rewards,
    )  # fmt: skip
