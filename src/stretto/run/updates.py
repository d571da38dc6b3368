"""Updates: from the batch to the weights of the next version, and what the trainer waited for before each.

Nothing is decided here: the core says which trajectories are the batch, and gets an event when they are trained.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.core.waits import Wait
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer
from stretto.observe.tail_latency import Tail
from stretto.run.protocols import TrainerBackend, VersionStore
from stretto.run.rollout import Rollout
from stretto.run.rollout_runner import Rollouts
from stretto.store.journal import Journal
from stretto.types import Batch, Sample, Weights, WeightsRef, older_versions

log = logging.getLogger(__name__)


class Updates:
    """The trainer's side of a run. For the loop's thread only."""

    def __init__(
        self,
        trainer: TrainerBackend,
        rollouts: Rollouts,
        weights: dict[int, Weights | WeightsRef],
        *,
        kept: Mapping[int, Rollout] | None,
        journal: Journal,
        tally: Tally,
        tail: Tail,
        observer: Observer,
        post: Callable[[core.Event], None],
        versions: VersionStore | None = None,
        brings_versions: bool = False,
        records_tokens: bool = False,
    ) -> None:
        """`kept` are trained rollouts that may be trained again; None: none ever is.

        With `brings_versions` the trainer gets the weights of the older versions that sampled a batch. With
        `records_tokens` the journal gets what the trainer computed for each token.
        """
        self.idle_since = 0.0
        self._reuses = kept is not None
        self._kept: dict[int, Rollout] = dict(kept or {})
        self._trainer = trainer
        self._rollouts = rollouts
        self._weights = weights  # the weight store: a new version is put into it
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._observer = observer
        self._post = post
        self._versions = versions
        self._brings_versions = brings_versions
        self._records_tokens = records_tokens
        self._batch: tuple[int, ...] = ()  # the trajectories that are trained for the first time
        self._waits_for = ""  # why the next update has not begun yet

    def note_wait(self, waits: Sequence[Wait]) -> None:
        """Keeps the reason why the trainer waits, until the update that it waits for begins."""
        self._waits_for = next((wait.reason for wait in waits if wait.owner == "trainer"), self._waits_for)

    def begin(self, command: core.Train) -> Coroutine[Any, Any, None]:
        """Records the batch, in the order of the core's decisions; the coroutine that is returned trains it."""
        waited_for, self._waits_for = self._waits_for, ""
        self._batch = command.trajectories
        samples = self._samples(command)
        self._journal.batch_taken(
            command.update,
            [sample.trajectory for sample in samples],
            at=clock.now(),
            uses=[sample.use for sample in samples],
            lineages=[sample.lineage for sample in samples],
        )
        if log.isEnabledFor(logging.DEBUG):
            _log_batch(command, samples, clock.now() - self.idle_since, waited_for)
        return self._update(command, waited_for)

    def _samples(self, command: core.Train) -> list[Sample]:
        """Returns the samples of a batch, in order."""
        uses = [(self._rollouts.in_progress[id], 0) for id in command.trajectories]
        uses += [(self._kept[id], use) for id, use in command.again]
        return [sample for rollout, use in uses for sample in samples_of(rollout, use)]

    def end(self) -> None:
        """Ends the rollouts of the batch that was trained, at the moment at which the core counts them as trained."""
        for id in self._batch:
            rollout = self._rollouts.remove(id)
            if self._reuses:
                self._kept[id] = rollout
        self._batch = ()

    def forget(self, trajectories: Sequence[int]) -> None:
        """Drops trained rollouts that are not trained again."""
        for id in trajectories:
            del self._kept[id]

    async def _update(self, command: core.Train, waited_for: str) -> None:
        samples = self._samples(command)
        idle_s = clock.now() - self.idle_since
        await self._journal.durable()
        started = clock.now()
        older = older_versions(samples, command.update) if self._brings_versions else ()
        sampled_by = {version: self._weights[version] for version in older if version in self._weights}
        batch = Batch(command.update, samples, sampled_by, reports_tokens=self._records_tokens)
        report, weights = await self._trainer.update(batch)
        ended = clock.now()

        self._weights[weights.version] = weights
        if self._versions is not None:
            self._versions.write(weights)  # durable before an engine loads it
        self._tail.updated(ended - started)
        line = self._tally.trained(samples, report, started=started, ended=ended, idle_s=idle_s, waited_for=waited_for)
        loads = self._rollouts.instances.reports()
        totals = self._tally.carried(loads, ended).sums()
        self._journal.update_done(
            command.update, line, at=ended,
            checksum=weights.checksum, totals=totals, samples=samples, advantages=report.advantages,
        )  # fmt: skip
        if report.tokens:
            self._journal.token_values(command.update, report.tokens)
        self._observer.updated(line)
        self.idle_since = ended
        self._tally.mark(loads, ended)
        self._post(core.Updated(command.update))
        if (measured := self._tail.measure()) is not None:
            self._post(core.Measured(*measured))


def _log_batch(command: core.Train, samples: Sequence[Sample], idle_s: float, waited_for: str) -> None:
    ages = Counter(command.update - sample.oldest_version for sample in samples)
    log.debug(
        "update %d takes %d groups, %d trajectories and %d again, of ages %s; the trainer was idle for %.2f s%s",
        command.update,
        len({sample.group for sample in samples}),
        len(command.trajectories),
        len(command.again),
        ", ".join(f"{age} ({count})" for age, count in sorted(ages.items())),
        idle_s,
        f", it waited: {waited_for}" if waited_for else "",
    )


def samples_of(rollout: Rollout, use: int) -> list[Sample]:
    """Returns what is trained on of a rollout: a sample for each of its lineages that is trained."""
    assert rollout.is_generated, rollout
    assert rollout.reward is not None, rollout
    return [
        Sample(
            rollout.id, rollout.group, rollout.version, lineage.context, lineage.completion, rollout.reward, use,
            turn_rewards=rollout.turn_rewards, lineage=number, turn_numbers=lineage.turn_numbers,
            reward_parts=rollout.reward_parts,
            task=rollout.prompt.task,
        )
        for number, lineage in enumerate(rollout.lineages)
        if lineage.train
    ]  # fmt: skip
