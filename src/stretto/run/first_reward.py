"""Ends a run early if no completion has ever got a reward: then the reward or the environment cannot work at all.

Once a completion has got one, `run/untrained_trajectories.py` alone decides when a run gives up, which takes much
longer: many may fail in a row that could be scored.
"""

from __future__ import annotations

from stretto.errors import LateRewardError, RequestError, StalledError

MAX_FAILED = 64  # completions whose first try failed
MAX_LATE = 16  # of which none returned in time: each of these costs a whole deadline
MIN_PROMPTS = 4  # that they belong to, as one prompt may be at fault


class FirstReward:
    """Waits for the first reward of a run, of an evaluation or a rollout. For the loop's thread only."""

    def __init__(self, *, came: bool = False) -> None:
        """`came`: an earlier session of the run has had one."""
        self._came = came
        self._failed: dict[int, int] = {}  # completion -> prompt
        self._late: dict[int, int] = {}

    def scored(self) -> None:
        """Notes that a completion has got a reward."""
        self._came = True
        self._failed.clear()
        self._late.clear()

    def failed(self, completion: int, prompt: int, error: Exception) -> None:
        """Notes that a completion got no reward. Raises `StalledError` if that was so for too many from the start.

        Numbers of rollouts are not negative, and those of evaluations are.
        """
        if self._came or isinstance(error, RequestError):
            return
        self._failed[completion] = prompt
        if isinstance(error, LateRewardError):
            self._late[completion] = prompt
        late, failed = (self._late, MAX_LATE, "did not return in time"), (self._failed, MAX_FAILED, "failed")
        for found, most, words in (late, failed):
            if len(found) >= most and len(set(found.values())) >= MIN_PROMPTS:
                raise StalledError(
                    f"the run gives up: no completion has got a reward yet, and the rewards of the first {len(found)} "
                    f"{words}; the last of them: {error}; try the reward by hand on a completion or two"
                )
