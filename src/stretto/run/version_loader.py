"""The version loader: brings versions into instances, and takes them out.

No instance loads a version before its checksum, and its weights if the run keeps them, are on the disk. An instance
confirms the checksum of what arrived. `send` alone repeats a transfer: a version that arrives damaged, or not at all,
is sent `TRANSFERS` times, and then the instance counts as lost. Engines and backends try once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.engines.protocol import Engine
from stretto.errors import ChecksumError, EngineError, LostObjectError
from stretto.run.instance_membership import Instances
from stretto.run.protocols import VersionStore
from stretto.store.journal import Journal
from stretto.types import Receipt, Weights, WeightsRef

log = logging.getLogger(__name__)

TRANSFERS = 3  # of one version to one instance


async def send(
    weights: Weights | WeightsRef, transfer: Callable[[], Awaitable[object]], note: Callable[[str, str], None]
) -> None:
    """Sends a version to an instance, again if it arrives damaged or not at all.

    `transfer` sends it once. `note` gets the kind and the text of every failure. Weights that lie elsewhere are
    recreated before they are sent again. Raises `EngineError` after `TRANSFERS` attempts, and `LostObjectError` if the
    weights are lost and nothing can recreate them: then no other instance could load them either.
    """
    for attempt in range(TRANSFERS):
        try:
            await transfer()
            return
        except (ChecksumError, LostObjectError) as error:
            lost = isinstance(error, LostObjectError)
            text = f"version {weights.version} {'did not arrive' if lost else 'arrived damaged'}: {error}"
            log.warning("%s", text)
            note("lost transfer" if lost else "damaged transfer", text)
            if attempt + 1 == TRANSFERS:
                raise EngineError(f"{text}, {TRANSFERS} times") from error
            if not isinstance(weights, Weights):
                await _recreate(weights, error)


async def _recreate(weights: WeightsRef, error: ChecksumError | LostObjectError) -> None:
    try:
        await weights.recreate()
    except LostObjectError as lost:
        if isinstance(error, LostObjectError):
            raise LostObjectError(
                f"version {weights.version} is lost ({error}; {lost}); continue the run with `--resume`"
            ) from lost
        log.warning("%s", lost)  # the copy that arrived damaged is the only one, and is sent again


class VersionLoader:
    """Loads, swaps and unloads versions. For the loop's thread only."""

    def __init__(
        self,
        instances: Instances,
        *,
        journal: Journal,
        post: Callable[[core.Event], None],
        versions: VersionStore | None = None,
    ) -> None:
        """`versions`: the files of their weights, where the run keeps them."""
        self.checksums: dict[int, str] = {}  # of the versions that instances have loaded or are loading
        self.newest: dict[int, int] = {}  # the version that each instance loaded last
        self._instances = instances
        self._journal = journal
        self._post = post
        self._versions = versions
        self._swaps: dict[int, asyncio.Future[None]] = {}  # the last swap of each instance

    async def load(self, instance: int, weights: Weights | WeightsRef) -> None:
        """Loads a version into an instance, beside those that it holds."""
        await self._durable(weights.version)
        await self._transfer(instance, weights, "load", lambda engine: engine.load(weights))

    async def swap(self, instance: int, old: int, weights: Weights | WeightsRef) -> None:
        """Replaces version `old` on an instance: what runs under it continues under the new weights."""
        swapped = self._swaps[instance] = asyncio.get_running_loop().create_future()
        try:
            await self._durable(weights.version)
            await self._transfer(instance, weights, "swap", lambda engine: engine.swap(old, weights))
        finally:
            swapped.set_result(None)

    async def swapped(self, instance: int | None) -> None:
        """Waits until no swap of an instance is in progress, including those that begin meanwhile.

        If this wait is cancelled, the swaps are not.
        """
        while instance in self._swaps and not self._swaps[instance].done():
            await asyncio.wait({self._swaps[instance]})

    async def unload(self, instance: int, version: int) -> None:
        """Unloads a version from an instance, after whatever was called in order before."""

        async def unload() -> None:
            await self._instances.call_in_order(instance, "unload", lambda engine: engine.unload(version))
            log.debug("instance %d: version %d unloaded", instance, version)

        await self._instances.lose_on_error(instance, unload())

    async def _durable(self, version: int) -> None:
        await self._journal.durable()
        if self._versions is not None:
            await self._versions.durable(version)

    async def _transfer(
        self,
        instance: int,
        weights: Weights | WeightsRef,
        what: str,
        work: Callable[[Engine], Coroutine[Any, Any, Receipt | None]],
    ) -> None:
        self.checksums[weights.version] = weights.checksum

        def note(kind: str, text: str) -> None:
            self._journal.note(kind, f"instance {instance}: {text}", at=clock.now())

        async def transfer() -> None:
            began = clock.now()
            given: list[Receipt | None] = []

            async def once() -> None:
                given.append(await self._instances.call_in_order(instance, what, work))

            await send(weights, once, note)
            if (receipt := given[-1]) is not None:
                self._journal.receipt_given(instance, receipt, at=clock.now())
            self.newest[instance] = weights.version
            log.debug("instance %d: %s of version %d took %.3f s", instance, what, weights.version, clock.now() - began)
            self._journal.version_loaded(weights.version, weights.checksum, at=clock.now())
            self._post(core.Loaded(instance, weights.version))

        await self._instances.lose_on_error(instance, transfer())
