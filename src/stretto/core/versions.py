"""The live versions: published, and not yet retired."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class VersionWindow:
    """The newest version, and the older ones that are still needed. Version numbers only grow."""

    __slots__ = ("live", "newest")

    def __init__(self, newest: int, live: Iterable[int] = ()) -> None:
        self.newest = newest
        self.live: set[int] = {newest, *live}

    def publish(self, version: int) -> None:
        """Makes `version` the newest."""
        if version != self.newest + 1:
            raise ValueError(f"version {version} cannot be published after version {self.newest}")
        self.newest = version
        self.live.add(version)

    def retirable(self, needed: Callable[[int], bool]) -> list[int]:
        """Returns the live versions that are not needed, oldest first. The newest is always needed."""
        return sorted(version for version in self.live if version != self.newest and not needed(version))

    def retire(self, version: int) -> None:
        """Removes a version from the live ones."""
        self.live.remove(version)
