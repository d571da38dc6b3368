"""A run in which no completion ever gets a reward ends early; any other goes on."""

from __future__ import annotations

import pytest

from stretto.errors import LateRewardError, RequestError, RewardError, StalledError
from stretto.run.first_reward import MAX_FAILED, MAX_LATE, MIN_PROMPTS, FirstReward


def failures(subject: FirstReward, count: int, error: Exception, *, per_prompt: int = 4, first: int = 0) -> None:
    for number in range(first, first + count):
        subject.failed(number, number // per_prompt, error)


@pytest.mark.parametrize(("error", "most"), [(RewardError("no"), MAX_FAILED), (LateRewardError("late"), MAX_LATE)])
def test_too_many_failures_from_the_start_end_the_run(error: Exception, most: int) -> None:
    subject = FirstReward()
    failures(subject, most - 1, error)
    failures(subject, most - 1, error)  # a second try of the same completions says nothing new
    with pytest.raises(StalledError, match=rf"rewards of the first {most} .*the last of them: {error}; try the reward"):
        failures(subject, 1, error, first=most - 1)


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
