"""The limits and the environment that the episodes of a task are played with. Several tasks have one each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.environments.protocol import Environment, is_deterministic
from stretto.environments.single_turn import SingleTurn
from stretto.types import Sampling


@dataclass(frozen=True, slots=True)
class TaskPlay:
    """The way in which the episodes of a task are played. Durations are in seconds."""

    environment: Environment
    sampling: Sampling
    max_turns: int = 1  # of one episode
    max_lineages: int = 1  # of one episode
    max_context: int | None = None  # tokens of a lineage with a context of its own; None: as many as the engine takes
    episode_s: float | None = None  # for an environment between tokens; None: whatever it waits for has a deadline
    cut_s: float | None = None  # of one episode outside of generation, after which it is cut; None: it is not
    budget: float = math.inf  # of one episode

    @property
    def is_single_turn(self) -> bool:
        """True if a reward function scores one completion."""
        return isinstance(self.environment, SingleTurn)

    @property
    def may_differ(self) -> bool:
        """True if an episode that is run again may ask for something else."""
        return not is_deterministic(self.environment)


Tasks = TaskPlay | Mapping[str | None, TaskPlay]
"""The options for playing each task of a run: of the only one, or by label."""

PlayOf = Callable[[str | None], TaskPlay]
"""Returns how the episodes of the task with a label are played; None: that of a task without one."""


def play_of(tasks: Tasks) -> PlayOf:
    """Returns the play of each task by its label. One that is given alone is that of every label."""
    if isinstance(tasks, TaskPlay):
        only = tasks
        return lambda task: only
    return dict(tasks).__getitem__


def longest_completion(tasks: Tasks) -> int:
    """Returns the most tokens of a completion, of any task."""
    plays = [tasks] if isinstance(tasks, TaskPlay) else tasks.values()
    return max(play.sampling.max_tokens for play in plays)
