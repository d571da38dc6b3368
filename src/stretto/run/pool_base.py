"""The part of a `Pool` that is the same wherever instances run: who they are, and how they go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

from stretto.engines.protocol import Engine


class InstancePool:
    """Instances by id. A subclass makes them in `add`, which takes a new id from `_new_id`."""

    def __init__(self, engines: Mapping[int, Engine] | None = None) -> None:
        self._engines = dict(engines or {})
        self._next = max(self._engines, default=-1) + 1

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The instances by their ids; a live view."""
        return MappingProxyType(self._engines)

    def _new_id(self) -> int:
        """Returns an id that was never used before in this pool."""
        instance, self._next = self._next, self._next + 1
        return instance

    async def remove(self, instance: int) -> None:
        """Ends an instance, in whatever state it is. An unknown id is not an error."""
        engine = self._engines.pop(instance, None)
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        """Ends all instances. Safe to call twice."""
        await asyncio.gather(*(self.remove(instance) for instance in list(self._engines)))
