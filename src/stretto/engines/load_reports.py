"""The report of an engine whose trajectories are Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from stretto.types import EngineStats, Request


@dataclass(slots=True)
class Counters:
    """The counts of an engine since it started, as in `EngineStats`."""

    steps: int = 0
    tokens: int = 0
    prefilled: int = 0
    busy_s: float = 0.0
    row_s: float = 0.0


class InProgress(Protocol):
    """A trajectory that an engine runs or has queued."""

    @property
    def request(self) -> Request: ...
    @property
    def made(self) -> int:
        """Tokens so far."""
        ...


def report_of(
    versions: Iterable[int], running: Sequence[InProgress], queued: Sequence[InProgress], counters: Counters
) -> EngineStats:
    """Returns the load of an engine with these resident versions and trajectories, with its counters."""
    counts, longest = dict.fromkeys(versions, 0), dict.fromkeys(versions, 0)
    for each in (*running, *queued):
        version = each.request.version
        counts[version] += 1
        longest[version] = max(longest[version], each.made)
    return EngineStats(
        running=len(running),
        queued=len(queued),
        kv_tokens=sum(len(each.request.prompt) + each.made for each in running),
        versions=counts,
        longest=longest,
        **asdict(counters),
    )
