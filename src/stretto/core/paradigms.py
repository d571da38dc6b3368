"""The five ways to run rollout beside training, as rows of one table. Behaviour follows the columns, never the name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OnPublish = Literal["none", "drain", "continue", "pinned"]
"""What becomes of running work when a version is published.

`none`: there is none. `drain`: the publish waits until nothing runs. `continue`: it goes on under the new weights.
`pinned`: it goes on under its own version.
"""


@dataclass(frozen=True, slots=True)
class Paradigm:
    """One row of the table."""

    name: str
    staleness: int | None  # the K it is defined by; None: the recipe's
    one_batch: bool  # `in_flight` is B; otherwise the recipe's
    on_publish: OnPublish
    bounded_by: Literal["deadlines", "in_flight"]  # what closes admission
    at_limit: Literal["wait", "drop"]  # a group that reaches its age limit: waited for, or thrown away
    breaks: tuple[int, ...] = ()  # the laws that it breaks by design

    @property
    def pinned(self) -> bool:
        """Whether a trajectory keeps its version for life (law 1)."""
        return self.on_publish != "continue"

    def slots(self, staleness: int) -> int:
        """How many versions rollout may have to hold at once, over all instances together."""
        return staleness + 1 if self.pinned else 1


def slots_needed(paradigm: Paradigm, staleness: int, *, evaluates: bool) -> int:
    """The version slots of a run: those of rollout, and one for evaluation where there is any."""
    return paradigm.slots(staleness) + int(evaluates)


_ROWS = (
    Paradigm("synchronous", 0, True, "none", "deadlines", "wait"),
    Paradigm("one-step-off", 1, True, "drain", "deadlines", "wait"),
    Paradigm("partial", None, False, "continue", "deadlines", "wait", breaks=(1,)),
    Paradigm("drop", None, False, "pinned", "in_flight", "drop", breaks=(2,)),
    Paradigm("multi-version", None, False, "pinned", "deadlines", "wait"),
)

PARADIGMS: Mapping[str, Paradigm] = {row.name: row for row in _ROWS}
