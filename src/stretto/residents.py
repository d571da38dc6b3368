"""The versions that instances hold: how they get there, and how they go.

Nothing is told of a version before its checksum, and where the run keeps them its weights, are on the disk. An instance
confirms the checksum of what arrived; what arrived damaged is sent again, and after `TRANSFERS` times the instance is
taken to be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.engines.protocol import Engine
from stretto.errors import ChecksumError, EngineError
from stretto.instances import Instances
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.types import Weights

log = logging.getLogger(__name__)

TRANSFERS = 3  # of one version to one instance, where what arrives is damaged


class Residents:
    """For the loop's thread only."""

    def __init__(
        self,
        instances: Instances,
        *,
        journal: Journal,
        post: Callable[[core.Event], None],
        versions: VersionFiles | None = None,
    ) -> None:
        """`versions`: the files of their weights, where the run keeps them."""
        self.checksums: dict[int, str] = {}  # of the versions that instances were told to load
        self.newest: dict[int, int] = {}  # the version that each instance was last brought
        self._instances = instances
        self._journal = journal
        self._post = post
        self._versions = versions
        self._swaps: dict[int, asyncio.Future[None]] = {}  # the last one of each instance

    async def load(self, instance: int, weights: Weights) -> None:
        """Have an instance hold a version besides those that it has."""
        await self._durable(weights.version)
        await self._transfer(instance, weights, "load", lambda engine: engine.load(weights))

    async def swap(self, instance: int, old: int, weights: Weights) -> None:
        """Have an instance go on under other weights with all that it runs under version `old`."""
        swapped = self._swaps[instance] = asyncio.get_running_loop().create_future()
        try:
            await self._durable(weights.version)
            await self._transfer(instance, weights, "swap", lambda engine: engine.swap(old, weights))
        finally:
            swapped.set_result(None)

    async def swapped(self, instance: int | None) -> None:
        """Wait until an instance has no swap before it, also of those that it is told meanwhile.

        To cancel this wait cancels no swap.
        """
        while instance in self._swaps and not self._swaps[instance].done():
            await asyncio.wait({self._swaps[instance]})

    async def unload(self, instance: int, version: int) -> None:
        """Have an instance forget a version, after whatever it was told before."""

        async def unload() -> None:
            await self._instances.ask(instance, "unload", lambda engine: engine.unload(version))

        await self._instances.on(instance, unload())

    async def _durable(self, version: int) -> None:
        await self._journal.durable()
        if self._versions is not None:
            await self._versions.durable(version)

    async def _transfer(
        self, instance: int, weights: Weights, what: str, work: Callable[[Engine], Coroutine[Any, Any, None]]
    ) -> None:
        self.checksums[weights.version] = weights.checksum

        async def transfer() -> None:
            for attempt in range(TRANSFERS):
                try:
                    await self._instances.ask(instance, what, work)
                    break
                except ChecksumError as error:
                    text = f"version {weights.version} arrived damaged on instance {instance}: {error}"
                    log.warning("%s", text)
                    self._journal.note("damaged transfer", text, at=clock.now())
                    if attempt + 1 == TRANSFERS:
                        raise EngineError(f"version {weights.version} arrived damaged {TRANSFERS} times") from error
            self.newest[instance] = weights.version
            self._journal.version_loaded(weights.version, weights.checksum, at=clock.now())
            self._post(core.Loaded(instance, weights.version))

        await self._instances.on(instance, transfer())
