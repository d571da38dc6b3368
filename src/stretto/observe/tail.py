"""How long groups take to generate against how long updates take: what `staleness = "auto"` follows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stretto import clock

GROUPS = 256  # over which the tail of generation is measured
UPDATES = 8
QUANTILE = 0.99


@dataclass(slots=True)
class _Span:
    """A group from its admission to the end of its last member, for the tail of generation."""

    started: float
    left: int  # members without an end
    scored: bool = False  # whether one of them got a reward


class Tail:
    """The time from a group's admission to the end of its last member. A group that is dropped is forgotten."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}  # by group; of those that began in this session
        self._group_seconds: deque[float] = deque(maxlen=GROUPS)
        self._update_seconds: deque[float] = deque(maxlen=UPDATES)

    def admitted(self, group: int, members: int) -> None:
        self._spans[group] = _Span(clock.now(), members)

    def dropped(self, group: int) -> None:
        self._spans.pop(group, None)

    def member_ended(self, group: int, *, scored: bool) -> None:
        """A trajectory has its reward or failed for good; the last one ends its group's time."""
        span = self._spans.get(group)
        if span is None:
            return  # it began before the run was resumed: how long it took is not known
        span.left -= 1
        span.scored |= scored
        if span.left == 0:
            del self._spans[group]
            if span.scored:  # a group without a survivor is replaced, and no batch ever waits for it
                self._group_seconds.append(clock.now() - span.started)

    def updated(self, seconds: float) -> None:
        """An update took so long."""
        self._update_seconds.append(seconds)

    def measure(self) -> tuple[float, float] | None:
        """The tail of the groups' seconds and the mean of the updates'; None before there are any."""
        if not self._group_seconds or not self._update_seconds:
            return None
        seconds = sorted(self._group_seconds)
        tail = seconds[min(len(seconds) - 1, int(QUANTILE * len(seconds)))]
        return tail, sum(self._update_seconds) / len(self._update_seconds)
