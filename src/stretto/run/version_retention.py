"""Keeps the weights of a version for as long as an update may need them, and then releases them.

Engines need a version while trajectories run under it. The trainer may need it longer: an objective can score tokens
under the version that sampled them, and these tokens are trained up to `K` updates later. Between the two, full weights
leave the device: they are read from their file, or wait in host memory. Adapters are small and stay where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, MutableMapping
from typing import Any

from stretto.errors import RunError, StalledError
from stretto.run.protocols import VersionStore
from stretto.store.journal import Journal
from stretto.types import Weights, WeightsRef

log = logging.getLogger(__name__)


class VersionRetention:
    """Releases versions that nothing needs. For the loop's thread only."""

    def __init__(
        self,
        weights: MutableMapping[int, Weights | WeightsRef],
        *,
        ages: int,
        retired: Iterable[int],
        journal: Journal,
        versions: VersionStore | None,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        """An update may need versions up to `ages` older than its own. `retired` are those no engine needs any more."""
        self._weights = weights
        self._ages = ages
        self._retired = set(retired)
        self._journal = journal
        self._versions = versions
        self._spawn = spawn

    def begin(self) -> None:
        """Moves off the device what no engine needs from the start: a resumed run has such versions."""
        for version in self._retired:
            self._spawn(self._move_off_device(version), f"move version {version} off the device")

    def retire(self, version: int, newest: int) -> None:
        """Notes that no engine needs a version any more. `newest` is the version that the next update trains."""
        log.debug("version %d is retired: no trajectory needs it any more", version)
        self._retired.add(version)
        self.release(newest)
        if version in self._retired:
            self._spawn(self._move_off_device(version), f"move version {version} off the device")

    def release(self, newest: int) -> None:
        """Releases the retired versions that no update from `newest` on can need."""
        for version in [each for each in self._retired if each < newest - self._ages]:
            self._retired.remove(version)
            self._weights.pop(version, None)
            if self._versions is not None:
                self._spawn(self._remove(self._versions, version), f"remove version {version}")

    async def _remove(self, versions: VersionStore, version: int) -> None:
        await self._journal.durable()  # it records that nothing needs the version
        versions.remove(version)

    async def _move_off_device(self, version: int) -> None:
        weights = self._weights.get(version)
        if weights is None or weights.kind == "lora":
            return
        moved: Weights | WeightsRef | None = None
        if self._versions is not None:
            with contextlib.suppress(RunError, StalledError):  # a file of a checkpoint alone: the run does without it
                await self._versions.durable(version)
            moved = self._versions.reference(weights)
        if moved is None and isinstance(weights, Weights):
            moved = await asyncio.to_thread(weights.on_host)
        if moved is not None and version in self._retired:
            self._weights[version] = moved
