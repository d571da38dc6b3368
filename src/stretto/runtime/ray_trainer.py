"""The trainer's seat over several ranks, each a Ray actor with a process of its own.

    RankedTrainer   one call after the other; where a rank is lost: new ranks, brought to the version, the call again
      RankGroup     (`ray_rank_group.py`) one life of the ranks: every call goes to all, and comes back by its deadline
        TrainerRank x N   (`ray_rank.py`) the trainer, which meets its peers over gloo or NCCL (`training/parallel.py`)

A group that is lost is made anew, and `restore` brings it to the version that the call is about: from the last
checkpoint, and by training again the updates after it from the journal. So nothing of a trainer is held by the driver,
and what a lost trainer costs is the updates since the last checkpoint. `RESTARTS` bounds how often.

The results of a call belong to whoever called it, so weights live in the object store of rank 0's machine and are owned
by the driver: they outlive the rank that made them and never pass through the driver, as rank 0 writes the file of a
version itself. They do not outlive its machine: new ranks that were brought to a version hand its weights over again.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from stretto.errors import LostObjectError, RunError, StrettoError, TrainerError, TrainerLostError
from stretto.runtime.ray_rank_group import RankGroup, RankOptions
from stretto.runtime.ray_weights import WeightsHandle
from stretto.runtime.roles import TrainerSeat
from stretto.types import Batch, UpdateReport, Weights

log = logging.getLogger(__name__)

RESTARTS = 4  # of the ranks, over a run

Result = TypeVar("Result")
Restore = Callable[[TrainerSeat, int], Awaitable[None]]
"""Brings a trainer that was just made, at version 0, to the version that is given."""


class RankedTrainer:
    """A seat that survives its ranks, as long as `restore` can bring new ones to where the lost ones were.

    Without `restore`, a rank that is lost ends the run by name. `notice` is told, in words, of every new start.
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
    ) -> None:
        self.restore = restore  # may be given later, before a rank is lost
        self.restarts = 0  # how often the ranks were started anew
        self._options = options
        self._deadline_s = deadline_s
        self._most_restarts = restarts
        self._notice = notice
        self._group: RankGroup | None = None  # to work with, or over
        self._coming: RankGroup | None = None  # placed, or on the way to the version
        self._version = 0
        self._latest: weakref.ref[WeightsHandle] | None = None  # what was handed over last
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def processes(self) -> tuple[int, ...]:
        """The process of each rank, on its machine."""
        return () if self._group is None else self._group.processes

    async def place(self) -> None:
        """Find a place for the ranks, before anything else takes the room; they start with the first call."""
        self._coming = RankGroup(self._options, deadline_s=self._deadline_s)
        await self._coming.place()

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        return await self._done(lambda group: self._updated(group, batch), batch.update)

    async def weights(self, version: int) -> Weights:
        return await self._done(lambda group: self._taken(group, version), None)

    async def base_checksum(self) -> str | None:
        return await self._done(lambda group: group.base_checksum(), None)

    async def _updated(self, group: RankGroup, batch: Batch) -> tuple[UpdateReport, Weights]:
        report, made = await group.update(batch)
        return report, self._own(made, group)

    async def _taken(self, group: RankGroup, version: int) -> Weights:
        return self._own(await group.weights(version), group)

    def _own(self, made: Any, group: RankGroup) -> Weights:
        """Weights that can be asked for again while the trainer is at their version."""
        handle: WeightsHandle = made
        handle.origin = _Origin(self, group)
        self._latest = weakref.ref(handle)
        return cast(Weights, handle)

    async def take_again(self, handle: WeightsHandle) -> Any:
        """A reference to weights that were lost; `LostObjectError` where the trainer is not at their version."""
        broken = handle.ref

        async def take(group: RankGroup) -> Any:
            if handle.ref is not broken:
                return handle.ref  # the ranks were lost too, and it came back with them
            if group.version != handle.version:
                raise LostObjectError(f"the trainer is at version {group.version} already")
            return await _same(group, handle)

        return await self._done(take, None)

    async def save(self, folder: Path) -> None:
        """Only the copy takes its turn; what is asked for next goes on while it is written."""

        async def capture(group: RankGroup) -> tuple[RankGroup, int]:
            return group, await group.capture()

        group, version = await self._done(capture, None)
        try:
            await group.write(folder)
        except TrainerLostError as error:
            raise RunError(f"the state of version {version} was lost with its rank: {error}") from error
        except TrainerError as error:
            raise RunError(f"the state of version {version} cannot be written: {error}") from error

    async def load(self, folder: Path) -> None:
        await self._done(lambda group: group.load(folder), 0)

    async def adopt(self, weights: Weights) -> None:
        await self._done(lambda group: group.adopt(weights), None)

    async def export(self, folder: Path) -> None:
        await self._done(lambda group: group.export(folder), None)

    def close(self) -> None:
        self._closed = True
        for group in (self._group, self._coming):
            if group is not None:
                group.close()

    async def _done(self, work: Callable[[RankGroup], Awaitable[Result]], version: int | None) -> Result:
        """Do something with the ranks; with new ones, at `version`, if those are lost. None: where they were."""
        async with self._turn:
            while True:
                try:
                    group = await self._ready(self._version if version is None else version)
                    found = await work(group)
                except TrainerLostError as error:
                    if self._group is not None:
                        self._group.end(error)
                    if self._closed or self.restore is None or self.restarts >= self._most_restarts:
                        raise
                    continue
                self._version = group.version
                return found

    async def _ready(self, version: int) -> RankGroup:
        """The ranks, started and at the version where the last ones were."""
        lost = self._group
        if lost is not None and lost.failure is None:
            return lost
        if lost is not None:
            if self._closed or self.restore is None or not isinstance(lost.failure, TrainerLostError):
                lost.check()
            if self.restarts >= self._most_restarts:
                lost.check()
            self.restarts += 1
            self._notice(f"{lost.failure}; the ranks are started anew ({self.restarts} of {self._most_restarts} times)")
        group = self._coming = self._coming or RankGroup(self._options, deadline_s=self._deadline_s)
        try:
            await group.start()
            if lost is not None and version:
                assert self.restore is not None, "without it, there is no other group"
                await self.restore(group, version)
                await self._hand_over_again(group, version)
                self._notice(f"the ranks of the trainer are at version {version} again")
        except BaseException as error:
            group.end(error if isinstance(error, StrettoError) else TrainerLostError(f"starting them ended: {error!r}"))
            raise
        finally:
            # Ranks on the way to a version are nobody's to use: here they are at it, or over.
            self._group, self._coming = group, None
        return group

    async def _hand_over_again(self, group: RankGroup, version: int) -> None:
        """What the lost ranks handed over last may be lost with their machine, and the next update leaves it behind."""
        handle = None if self._latest is None else self._latest()
        if handle is None or handle.version != version:
            return
        try:
            handle.ref = await _same(group, handle)
        except LostObjectError as error:
            log.warning("%s", error)  # where it is not lost, nothing is


@dataclass(frozen=True, slots=True)
class _Origin:
    """The `Origin` of weights."""

    seat: RankedTrainer
    group: RankGroup  # of which rank 0 made them

    def store(self, handle: WeightsHandle, folder: Path) -> bool:
        return self.group.store(handle.ref, folder)

    async def again(self, handle: WeightsHandle) -> Any:
        return await self.seat.take_again(handle)


async def _same(group: RankGroup, handle: WeightsHandle) -> Any:
    """A reference to the weights of a handle, from ranks that are at its version."""
    made: Any = await group.weights(handle.version)
    if made.checksum != handle.checksum:
        raise LostObjectError(f"version {handle.version} was trained again with other bits")
    return made.ref
