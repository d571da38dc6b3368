"""A run in which no completion ever gets a reward ends early; any other goes on."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.environments.task_options import (
    AgentOptions,
    CountdownChainOptions,
    FileOptions,
    GuessOptions,
    TaskOptions,
)
from stretto.errors import LateRewardError, RequestError, RewardError, StalledError
from stretto.run.first_reward import MAX_FAILED, MAX_LATE, MIN_PROMPTS, FirstReward, how_to_try


def failures(subject: FirstReward, count: int, error: Exception, *, per_prompt: int = 4, first: int = 0) -> None:
    for number in range(first, first + count):
        subject.failed(number, number // per_prompt, error)


@pytest.mark.parametrize(("error", "most"), [(RewardError("no"), MAX_FAILED), (LateRewardError("late"), MAX_LATE)])
def test_too_many_failures_from_the_start_end_the_run(error: Exception, most: int) -> None:
    subject = FirstReward(advice={None: "try the reward by hand"})
    failures(subject, most - 1, error)
    failures(subject, most - 1, error)  # a second try of the same completions says nothing new
    with pytest.raises(StalledError, match=rf"rewards of the first {most} .*the last of them: {error}; try the reward"):
        failures(subject, 1, error, first=most - 1)


ROWS: dict[str, Any] = {"path": "rows.jsonl"}
JUDGE: Any = {"address": "http://host/v1", "model": "m", "prompt": "{completion}", "scale": (0, 10)}


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        (FileOptions(**ROWS, reward="a:b"), "try the reward by hand on a completion or two"),
        (
            FileOptions(**ROWS, judge=JUDGE),
            "ask the judge the question of `task.judge` by hand, and compare its answer with `scale` and `pattern`",
        ),
        (
            FileOptions(**ROWS, reward_model={"path": "m"}),
            "give the classifier of `task.reward_model` a conversation or two by hand",
        ),
        (
            FileOptions(**ROWS, rewards=({"function": "a:b"}, {"judge": JUDGE, "name": "kind"})),
            "try the reward by hand on a completion or two; ask the judge the question of `task.rewards.kind.judge` by "
            "hand, and compare its answer with `scale` and `pattern`",
        ),
        (GuessOptions(), "play an episode or two of the environment by hand"),
        (
            AgentOptions(**ROWS, command=("python", "agent.py")),
            "run the agent, `task.command`, by hand against `stretto serve`",
        ),
        (AgentOptions(**ROWS, function="a:b"), "run the agent, `task.function`, by hand against `stretto serve`"),
        (CountdownChainOptions(), "try the reward by hand on a completion or two"),
    ],
)
def test_the_advice_fits_what_scores_the_task(task: TaskOptions, advice: str) -> None:
    assert how_to_try(task) == advice


def test_the_advice_is_that_of_the_task_that_fails() -> None:
    subject = FirstReward(advice={"math": "try math", "agent": "try the agent"})
    for number in range(MAX_FAILED - 1):
        subject.failed(number, number // 4, RewardError("no"), "math")
    with pytest.raises(StalledError, match=r"the last of them, of task `agent`: no; try the agent$"):
        subject.failed(MAX_FAILED, 0, RewardError("no"), "agent")


@pytest.mark.parametrize("error", [RewardError("no"), LateRewardError("late")])
def test_after_one_reward_any_number_may_fail(error: Exception) -> None:
    failures(FirstReward(came=True), 10 * MAX_FAILED, error)
    subject = FirstReward()
    failures(subject, MAX_LATE - 1, error)
    subject.scored()
    failures(subject, 10 * MAX_FAILED, error)


def test_a_few_prompts_alone_or_requests_that_cannot_be_served_do_not_end_the_run() -> None:
    subject = FirstReward()
    failures(subject, 10 * MAX_FAILED, LateRewardError("late"), per_prompt=10 * MAX_FAILED // (MIN_PROMPTS - 1) + 1)
    failures(FirstReward(), 10 * MAX_FAILED, RequestError("too long"))
