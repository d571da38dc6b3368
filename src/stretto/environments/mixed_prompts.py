"""The prompts of several tasks as one stream: which task comes next (`task_shares.py`), and which of its rows.

Each task has its own `PromptStream`, whose positions count the draws of that task alone: a task of 100 rows begins its
second epoch with its 101st draw. A draw is a function of the seed, of the draws before it and of the groups that were
lost before it; with `order = "pass-rate"` also of rewards, as in `prompt_order.py`. The journal has all of these, so a
resumed run continues with the same draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stretto.environments.data import PromptStream
from stretto.environments.prompt_order import Draw
from stretto.environments.task_shares import TaskShares
from stretto.types import Prompt


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group that a run has drawn before it was resumed."""

    group: int
    task: str
    lost_before: int | None  # the group that was drawn next when it was counted as lost; None: it was not


class _Streams:
    """The properties that several streams of prompts share."""

    def __init__(self, streams: Mapping[str, PromptStream]) -> None:
        self.streams = dict(streams)

    @property
    def num_rows(self) -> int:
        """Rows of all tasks."""
        return sum(stream.num_rows for stream in self.streams.values())

    @property
    def num_templated(self) -> int:
        """Rows of all tasks whose prompts the chat template renders."""
        return sum(stream.num_templated for stream in self.streams.values())

    @property
    def longest_checked(self) -> int:
        """Tokens of the longest prompt that was checked."""
        return max(stream.longest_checked for stream in self.streams.values())


class MixedPrompts(_Streams):
    """An endless stream of prompts of several tasks, with the interface of a `PromptStream`."""

    def __init__(self, streams: Mapping[str, PromptStream], shares: TaskShares) -> None:
        super().__init__(streams)
        self._shares = shares
        self._places: Counter[str] = Counter()  # draws of each task, in the whole run
        self._since = 0  # the first group that the present shares count

    @property
    def follows_rewards(self) -> bool:
        """True if later draws depend on rewards."""
        return any(stream.follows_rewards for stream in self.streams.values())

    def draw(self, index: int) -> Draw:
        """Draws a task, and a row of it, for group `index`. Each is drawn once, in order."""
        label = self._shares.next()
        why, place = self._shares.described(label), self._places[label]
        made = self.streams[label].draw(place)
        self._shares.drawn(label)
        self._places[label] += 1
        return replace(made, reason=f"{made.reason}; task {label}: {why}", task=label, place=place)

    def lost(self, group: int, task: str | None) -> None:
        """Notes that a group will not be trained: one of the same task replaces it."""
        assert task is not None
        if group >= self._since:
            self._shares.lost(task)

    def recall(self, drawn: Iterable[DrawnGroup], since: int) -> None:
        """Repeats what a run has drawn and lost. Its present shares hold from group `since` on."""
        self._since = since
        for each in drawn:
            self._places[each.task] += 1
            if each.group >= since:
                self._shares.drawn(each.task)
                if each.lost_before is not None:
                    self._shares.lost(each.task)

    def drawn(self, row_number: int, task: str | None = None) -> None:
        """Notes that a row of a task was drawn before the run was resumed."""
        self._stream(task).drawn(row_number)

    def scored(self, row_number: int, reward: float, task: str | None = None) -> None:
        """Notes the reward of a trajectory of a row of a task, for later draws."""
        self._stream(task).scored(row_number, reward)

    def settle(self, update: int) -> None:
        """Notes that the batch of an update was taken."""
        for stream in self.streams.values():
            stream.settle(update)

    def prompt(self, index: int, row_number: int, task: str | None = None) -> Prompt:
        """Returns the prompt of group `index`, made from a row of a task."""
        return self._stream(task).prompt(index, row_number)

    def epochs(self) -> dict[str, float]:
        """Returns how often each task has drawn as many rows as it has."""
        return {label: self._places[label] / stream.num_rows for label, stream in self.streams.items()}

    def _stream(self, task: str | None) -> PromptStream:
        assert task is not None
        return self.streams[task]


class MixedHeldOut(_Streams):
    """The held-out prompts of several tasks: those of the first, then those of the next."""

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt at position `index`."""
        place = index
        for stream in self.streams.values():
            if place < stream.num_rows:
                return replace(stream.prompt(place), index=index)
            place -= stream.num_rows
        raise IndexError(index)


Prompts = PromptStream | MixedPrompts
"""The prompts that a run draws: of one task, or of several."""

HeldOut = PromptStream | MixedHeldOut
"""The prompts that a run is evaluated on."""
