"""Ends a run early if no completion has ever got a reward: then the reward or the environment cannot work at all.

Once a completion has got one, `run/untrained_trajectories.py` alone decides when a run gives up, which takes much
longer: many may fail in a row that could be scored.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.task_options import (
    AgentOptions,
    EpisodeTaskOptions,
    FileOptions,
    TaskOptions,
    option_of,
    rewards_of,
)
from stretto.errors import LateRewardError, RequestError, StalledError

MAX_FAILED = 64  # completions whose first try failed
MAX_LATE = 16  # of which none returned in time: each of these costs a whole deadline
MIN_PROMPTS = 4  # that they belong to, as one prompt may be at fault


def how_to_try(task: TaskOptions, name: str = "task") -> str:
    """Returns how a user tries by hand what scores a task. `name` is the dotted name of its table."""
    if isinstance(task, AgentOptions):
        key = "command" if task.function is None else "function"
        return f"run the agent, `{name}.{key}`, by hand against `stretto serve`"
    if isinstance(task, EpisodeTaskOptions):
        return "play an episode or two of the environment by hand"
    scorers = dict(task.scorers) if isinstance(task, FileOptions) else {}
    ways = []
    if len(scorers) < max(1, len(rewards_of(task))):
        ways.append("try the reward by hand on a completion or two")
    for reward, options in scorers.items():
        table = option_of(options, reward, name)
        if isinstance(options, JudgeOptions):
            ways.append(
                f"ask the judge the question of `{table}` by hand, and compare its answer with "
                f"`{'scale' if options.scale is not None else 'choices'}` and `pattern`"
            )
        else:
            ways.append(f"give the classifier of `{table}` a conversation or two by hand")
    return "; ".join(ways)


class FirstReward:
    """Waits for the first reward of a run, of an evaluation or a rollout. For the loop's thread only."""

    def __init__(self, *, came: bool = False, advice: Mapping[str | None, str] | None = None) -> None:
        """`came`: an earlier session of the run has had one. `advice`: how to try each task by hand, by its label."""
        self._advice = advice or {}
        self._came = came
        self._failed: dict[int, int] = {}  # completion -> prompt
        self._late: dict[int, int] = {}

    def scored(self) -> None:
        """Notes that a completion has got a reward."""
        self._came = True
        self._failed.clear()
        self._late.clear()

    def failed(self, completion: int, prompt: int, error: Exception, task: str | None = None) -> None:
        """Notes that a completion got no reward. Raises `StalledError` if that was so for too many from the start.

        Numbers of rollouts are not negative, and those of evaluations are. `task` is the label of its task.
        """
        if self._came or isinstance(error, RequestError):
            return
        self._failed[completion] = prompt
        if isinstance(error, LateRewardError):
            self._late[completion] = prompt
        late, failed = (self._late, MAX_LATE, "did not return in time"), (self._failed, MAX_FAILED, "failed")
        for found, most, words in (late, failed):
            if len(found) >= most and len(set(found.values())) >= MIN_PROMPTS:
                advice, of_task = self._advice.get(task), "" if task is None else f", of task `{task}`"
                raise StalledError(
                    f"the run gives up: no completion has got a reward yet, and the rewards of the first {len(found)} "
                    f"{words}; the last of them{of_task}: {error}" + (f"; {advice}" if advice else "")
                )
