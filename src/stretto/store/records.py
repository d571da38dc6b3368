"""Records that a reader of a journal returns: of trajectories, groups, updates, samples, tasks, phases and more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.types import HeldOutScore, Prompt, RewardPart


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """The current state of a trajectory."""

    trajectory: int
    group: int
    member: int
    version: int
    seed: int
    state: str
    failures: int  # failed attempts to generate or to score it
    instance: int | None
    reward: float | None
    error: str | None
    reward_parts: tuple[RewardPart, ...] | None = None  # if the task has several rewards


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An admitted group with all of its trajectories, including those that have ended."""

    group: int
    epoch: int | None  # None: rows are drawn by pass rate, not in epochs
    row_number: int  # of the data set
    version: int
    deadline: int
    staleness: int
    prompt: Prompt
    admitted_at: float
    trajectories: tuple[TrajectoryRecord, ...]
    task: str | None = None  # the label of its task


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """An update with statistics of its batch; `finished_at` is None while it trains."""

    update: int
    taken_at: float
    finished_at: float | None
    metrics: Mapping[str, Any]
    num_samples: int
    num_again: int  # of them trained before (reuse)
    reward: float  # mean
    tokens: float  # mean length of a completion
    age: float  # mean, in updates
    oldest: int  # the highest age


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A lineage of a trained trajectory, as text."""

    trajectory: int
    group: int
    member: int
    version: int
    age: int
    use: int
    prompt: str
    text: str
    reward: float | None
    num_tokens: int  # sampled
    finish: str
    turns: int
    lineage: int
    num_lineages: int
    train: bool  # False: it was not trained on
    context: str | None  # None: the prompt
    turn_rewards: tuple[float, ...] | None  # one for each turn of the trajectory, if the environment returns them
    limit: str | None  # that its episode reached
    spent: float | None  # by its episode
    task: str | None  # the label of its task
    reward_parts: tuple[RewardPart, ...] | None = None  # if the task has several rewards

    @property
    def rewards(self) -> dict[str, float | None]:
        """The value of each reward by its name, without its weight; None: it does not apply. Empty: there is one."""
        return {part.name: part.value for part in self.reward_parts or ()}


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task of a run, and what became of its groups so far."""

    label: str
    drawn: int  # groups
    trained: int  # groups; those of an update that trains now are among them
    filtered: int  # groups
    failed: int  # trajectories
    reward: float | None  # mean of the trained trajectories' groups; None: there is none


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation; `reward` is None if it was skipped, or nothing could be scored."""

    version: int
    kind: str
    at: float
    reward: float | None
    num: int  # prompts that `reward` is the mean of
    seconds: float
    greedy: HeldOutScore | None  # None: not asked for, or skipped
    tasks: Mapping[str, float | None]  # the score of each task that has a label


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A part of a run with one recipe."""

    phase: int
    first_update: int  # that is trained under it
    first_group: int  # that is admitted under it
    began_at: float
    recipe: str  # TOML


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session (one process's life of the run); `outcome` is None while it runs and if it was killed.

    `error` is the first line of the error that it failed by.
    """

    started_at: float
    ended_at: float | None
    outcome: str | None
    error: str | None = None
