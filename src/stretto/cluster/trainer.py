"""The `TrainerBackend` of a cluster: ranks in Ray actors, which are replaced when one of them is lost.

    RankedTrainer   one call after the other; if a rank is lost: new ranks, restored to the version, and the call again
      RankGroup     (`rank_group.py`) the ranks until one is lost: every call goes to all, and ends by its deadline
        TrainerRank x N   (`rank_actor.py`) the trainer, which meets its peers over gloo or NCCL
        (`training/parallel.py`)

After a loss, `restore` brings new ranks to the version that the call is about: from the last checkpoint, and by
training again the updates after it from the journal. So the driver holds no trainer state, and a lost trainer costs the
updates since the last checkpoint. `RESTARTS` bounds how often that happens.

The driver calls the ranks, so it owns the weights that they return, which lie in the object store of rank 0's machine.
They outlive the rank that made them. They never pass through the driver, because rank 0 writes the version files. They
do not outlive rank 0's machine: new ranks at the same version hand the weights over again.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stretto.cluster.rank_group import RankGroup, RankOptions
from stretto.cluster.weights import RayWeightsRef, WeightsStore
from stretto.errors import LostObjectError, RunError, StrettoError, TrainerError, TrainerLostError
from stretto.run.protocols import TrainerBackend
from stretto.types import Batch, UpdateReport, Weights, WeightsRef

log = logging.getLogger(__name__)

RESTARTS = 4  # of the ranks, over a run
LOSSES = TrainerLostError, LostObjectError  # of a run on a cluster: new ranks are restored without what was lost
TRANSFERS = 3  # of an older version to the ranks, for one update

Result = TypeVar("Result")
Restore = Callable[[TrainerBackend, int], Awaitable[None]]
"""Brings a trainer that was just made, at version 0, to the version that is given."""


class RankedTrainer:
    """A `TrainerBackend` that survives the loss of its ranks, as long as `restore` can bring new ones to their version.

    New ranks are at version 0. Without `restore`, the loss of a rank at a later version ends the run. `notice` gets a
    sentence for every restart.
    """

    kv_given_back = 0

    def __init__(
        self,
        options: RankOptions,
        *,
        deadline_s: float,
        restore: Restore | None = None,
        restarts: int = RESTARTS,
        notice: Callable[[str], None] = log.warning,
        store: WeightsStore | None = None,
    ) -> None:
        self.restore = restore  # may be set later, before a rank is lost
        self.restarts = 0  # how often the ranks were replaced
        self._options = options
        self._deadline_s = deadline_s
        self._max_restarts = restarts
        self._notice = notice
        self._store = store or WeightsStore()
        self._group: RankGroup | None = None  # placed, in use, or lost
        self._version = 0
        self._latest: weakref.ref[RayWeightsRef] | None = None  # the weights that were returned last
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def processes(self) -> tuple[int, ...]:
        """The process id of each rank, on its machine."""
        return () if self._group is None else self._group.processes

    async def place(self) -> None:
        """Finds room for the ranks, before instances take it. The ranks start with the first call."""
        async with self._turn:
            await self._survive(RankGroup.place, 0)

    async def update(self, batch: Batch) -> tuple[UpdateReport, RayWeightsRef]:
        """Trains one update. Versions that it is scored under and that are lost are put into the object store again."""
        for _ in range(TRANSFERS - 1):
            try:
                return await self._call(lambda group: self._update(group, batch), batch.update)
            except LostObjectError as error:
                log.warning("update %d: %s", batch.update, error)
                for each in batch.versions.values():
                    if isinstance(each, RayWeightsRef):
                        each.failed_ref = each.ref
                        await each.recreate()
        return await self._call(lambda group: self._update(group, batch), batch.update)

    async def weights(self, version: int) -> RayWeightsRef:
        return await self._call(lambda group: self._weights(group, version), None)

    async def base_checksum(self) -> str | None:
        return await self._call(lambda group: group.base_checksum(), None)

    async def _update(self, group: RankGroup, batch: Batch) -> tuple[UpdateReport, RayWeightsRef]:
        report, made = await group.update(batch)
        return report, self._own(made, group)

    async def _weights(self, group: RankGroup, version: int) -> RayWeightsRef:
        return self._own(await group.weights(version), group)

    def _own(self, weights: RayWeightsRef, group: RankGroup) -> RayWeightsRef:
        """Makes weights recoverable from this trainer while it is at their version."""
        self._latest = weakref.ref(weights)
        return self._store.own(weights, _Producer(self, group))

    async def take_again(self, weights: RayWeightsRef) -> Any:
        """Returns a reference to weights that were lost, or raises `LostObjectError` if it is at another version."""
        lost = weights.ref

        async def take(group: RankGroup) -> Any:
            if weights.ref is not lost:
                return weights.ref  # the ranks were lost too, and new ones have handed it over again
            if group.version != weights.version:
                raise LostObjectError(f"the trainer is at version {group.version} already")
            return await _same(group, weights)

        return await self._call(take, None)

    async def save(self, folder: Path) -> None:
        """Copies the state in turn with other calls, and writes it beside them."""

        async def capture(group: RankGroup) -> tuple[RankGroup, int]:
            return group, await group.capture()

        group, version = await self._call(capture, None)
        try:
            await group.write(folder)
        except TrainerLostError as error:
            raise RunError(f"the state of version {version} was lost with its rank: {error}") from error
        except TrainerError as error:
            raise RunError(f"the state of version {version} cannot be written: {error}") from error

    async def load(self, folder: Path) -> None:
        await self._call(lambda group: group.load(folder), 0)

    async def adopt(self, weights: Weights | WeightsRef) -> None:
        await self._call(lambda group: group.adopt(weights), None)

    async def export(self, folder: Path) -> None:
        await self._call(lambda group: group.export(folder), None)

    def close(self) -> None:
        self._closed = True
        if self._group is not None:
            self._group.close()

    async def _call(self, work: Callable[[RankGroup], Awaitable[Result]], version: int | None) -> Result:
        """Calls the ranks once they have started and are at `version`, in turn with other calls.

        `version` None stands for the version of the last call.
        """

        async def started(group: RankGroup) -> Result:
            if not group.processes:
                await self._start(group, at)
            return await work(group)

        async with self._turn:
            at = self._version if version is None else version
            return await self._survive(started, at)

    async def _survive(self, work: Callable[[RankGroup], Awaitable[Result]], version: int) -> Result:
        """Does `work` with the ranks. If they are lost, does it with new ones, which may have to be at `version`."""
        while True:
            group = self._living(version)
            try:
                found = await work(group)
            except TrainerLostError as error:
                group.end(error)
                continue  # with others, or `_living` raises the same
            self._version = group.version
            return found

    def _living(self, version: int) -> RankGroup:
        """Returns the ranks, or new ones in place of lost ones. Raises the failure of ranks that are not replaced."""
        lost = self._group
        if lost is not None:
            if lost.failure is None:
                return lost
            replaced = isinstance(lost.failure, LOSSES) and self.restarts < self._max_restarts
            if self._closed or not replaced or (version and self.restore is None):
                lost.check()
            self.restarts += 1
            self._notice(f"{lost.failure}; the ranks are restarted ({self.restarts} of {self._max_restarts} times)")
        self._group = RankGroup(self._options, deadline_s=self._deadline_s)
        return self._group

    async def _start(self, group: RankGroup, version: int) -> None:
        """Starts ranks. Those that replace others are brought to `version`, or ended: nothing uses them before."""
        try:
            await group.start()
            if self.restarts and version:
                assert self.restore is not None, "without it, lost ranks are not replaced"
                await self.restore(group, version)
                await self._replace_latest(group, version)
                self._notice(f"the ranks of the trainer are at version {version} again")
        except LostObjectError as error:  # what was lost meanwhile is made again from the start
            raise TrainerLostError(f"bringing the ranks to version {version} failed: {error}") from error
        except BaseException as error:
            group.end(error if isinstance(error, StrettoError) else TrainerLostError(f"starting them ended: {error!r}"))
            raise

    async def _replace_latest(self, group: RankGroup, version: int) -> None:
        """Replaces the weights that the lost ranks returned last: they may be lost with the machine, and after the next
        update the ranks no longer have them."""
        latest = None if self._latest is None else self._latest()
        if latest is None or latest.version != version:
            return
        try:
            latest.ref = await _same(group, latest)
        except LostObjectError as error:
            log.warning("%s", error)  # the old copy may still be there


@dataclass(frozen=True, slots=True)
class _Producer:
    """The `WeightsProducer` of weights that rank 0 of `group` made."""

    trainer: RankedTrainer
    group: RankGroup

    def store(self, weights: RayWeightsRef, folder: Path) -> bool:
        return self.group.store(weights.ref, folder)

    async def produce_again(self, weights: RayWeightsRef) -> Any:
        return await self.trainer.take_again(weights)


async def _same(group: RankGroup, weights: RayWeightsRef) -> Any:
    """Returns a reference to another copy of the same weights, from ranks that are at their version."""
    made = await group.weights(weights.version)
    if made.checksum != weights.checksum:
        raise LostObjectError(f"version {weights.version} was trained again with other bits")
    return made.ref
