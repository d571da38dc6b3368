"""Measures the tail latency of groups and the duration of updates, which `staleness = "auto"` depends on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stretto import clock

GROUPS = 256  # over which the tail latency is measured
UPDATES = 8  # over which the duration is averaged
QUANTILE = 0.99


@dataclass(slots=True)
class _Span:
    """A group whose members have not all ended."""

    started: float
    left: int  # members that have not ended
    scored: bool = False  # True once a member has its reward


class Tail:
    """Measures the time from a group's admission to the end of its last member. A dropped group does not count.

    If a group needs the rewards of some of its members only, the last of these is the last member.
    """

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}  # by group, of those that began in this session
        self._group_seconds: deque[float] = deque(maxlen=GROUPS)
        self._update_seconds: deque[float] = deque(maxlen=UPDATES)

    def admitted(self, group: int, members: int) -> None:
        self._spans[group] = _Span(clock.now(), members)

    def dropped(self, group: int) -> None:
        self._spans.pop(group, None)

    def completed(self, group: int) -> None:
        """Records that a group has all rewards that it needs, and that its other members were dropped."""
        if (span := self._spans.pop(group, None)) is not None:
            self._group_seconds.append(clock.now() - span.started)

    def member_ended(self, group: int, *, scored: bool) -> None:
        """Records that a trajectory has its reward or has finally failed; the last one of a group ends its time."""
        span = self._spans.get(group)
        if span is None:
            return  # it began before the run was resumed, so its time is unknown
        span.left -= 1
        span.scored |= scored
        if span.left == 0:
            del self._spans[group]
            if span.scored:  # a group whose members all failed is replaced, and no batch waits for it
                self._group_seconds.append(clock.now() - span.started)

    def updated(self, seconds: float) -> None:
        """Records the duration of an update."""
        self._update_seconds.append(seconds)

    def measure(self) -> tuple[float, float] | None:
        """The tail latency of groups and the mean duration of updates, in seconds; None before there are any."""
        if not self._group_seconds or not self._update_seconds:
            return None
        seconds = sorted(self._group_seconds)
        tail = seconds[min(len(seconds) - 1, int(QUANTILE * len(seconds)))]
        return tail, sum(self._update_seconds) / len(self._update_seconds)
