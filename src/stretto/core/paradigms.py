"""The five ways to combine rollout and training, as rows of one table. Code looks at the columns, never at the name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OnPublish = Literal["none", "drain", "continue", "pinned"]
"""The effect of a publish on running trajectories.

`none`: nothing runs then. `drain`: the publish waits until nothing runs. `continue`: they continue under the new
weights. `pinned`: they continue under their own version.
"""


@dataclass(frozen=True, slots=True)
class Paradigm:
    """One row of the table."""

    name: str
    staleness: int | None  # K, if the paradigm fixes it; None: the recipe chooses
    one_batch: bool  # `in_flight` is B; if False, the recipe chooses
    on_publish: OnPublish
    bounded_by: Literal["deadlines", "in_flight"]  # the rule that closes admission
    at_limit: Literal["wait", "drop"]  # the trainer waits for a group at its age limit, or drops it
    breaks: tuple[int, ...] = ()  # the laws that it gives up by design

    @property
    def pinned(self) -> bool:
        """True if a trajectory keeps its version to its end (law 1)."""
        return self.on_publish != "continue"

    @property
    def allows_redundancy(self) -> bool:
        """True if more groups or members may be started than are trained on: something is waited for otherwise."""
        return self.at_limit == "wait"

    def slots(self, staleness: int) -> int:
        """Returns the number of versions that rollout may have to hold at once, over all instances together."""
        return staleness + 1 if self.pinned else 1


def slots_needed(paradigm: Paradigm, staleness: int, *, evaluates: bool) -> int:
    """Returns the version slots of a run: those of rollout, and one if the run evaluates."""
    return paradigm.slots(staleness) + int(evaluates)


_ROWS = (
    Paradigm("synchronous", 0, True, "none", "deadlines", "wait"),
    Paradigm("one-step-off", 1, True, "drain", "deadlines", "wait"),
    Paradigm("partial", None, False, "continue", "deadlines", "wait", breaks=(1,)),
    Paradigm("drop", None, False, "pinned", "in_flight", "drop", breaks=(2,)),
    Paradigm("multi-version", None, False, "pinned", "deadlines", "wait"),
)

PARADIGMS: Mapping[str, Paradigm] = {row.name: row for row in _ROWS}
