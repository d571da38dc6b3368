"""Rewards in threads of this process: deadlines without an end of the thread, and one failed item at a time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stretto.environments.thread_rewards import ThreadRewards
from stretto.errors import LateRewardError, RecipeError, RewardError

PATIENCE_S = 30.0


def scores(reward: Callable[..., Any], rows: list[Mapping[str, Any]], **options: Any) -> list[float | BaseException]:
    """Scores all rows at once, and returns rewards and errors."""

    async def story() -> list[float | BaseException]:
        rewards = ThreadRewards("python:mine", {"": reward}, **options)
        await rewards.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                asked = (rewards.score("2+2=", "4", row) for row in rows)
                return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await rewards.close()
            await rewards.close()

    return asyncio.run(story())


def test_a_function_of_this_process_scores_with_the_columns_that_it_names() -> None:
    seen = []

    def mine(prompt: str, completion: str, weight: float) -> float:
        seen.append((prompt, completion, threading.current_thread() is threading.main_thread()))
        return 2 * weight

    assert scores(mine, [{"weight": 1.0, "other": "x"}, {"weight": 4}]) == [2.0, 8.0]
    assert seen == [("2+2=", "4", False)] * 2


def test_a_reward_that_raises_or_returns_no_number_fails_alone() -> None:
    def mine(prompt: str, completion: str, how: str) -> Any:
        if how == "raises":
            raise KeyError("answer")
        if how == "exits":
            sys.exit(3)
        return {"text": "three", "nan": float("nan"), "fine": 1}[how]

    raised, exited, text, nan, fine = scores(
        mine, [{"how": how} for how in ("raises", "exits", "text", "nan", "fine")], threads=2
    )
    assert "`python:mine` raised KeyError: 'answer' (test_thread_rewards.py:" in str(raised)
    assert "SystemExit: 3" in str(exited)
    assert "returned 'three' (str); a reward is a finite number" in str(text)
    assert isinstance(nan, RewardError)
    assert fine == 1.0


def test_a_reward_that_hangs_is_late_and_nothing_waits_for_its_thread() -> None:
    release = threading.Event()

    def mine(prompt: str, completion: str, hangs: bool) -> float:
        if hangs:
            release.wait(PATIENCE_S)
        return 1.0

    try:
        first, late, last = scores(mine, [{"hangs": hangs} for hangs in (False, True, False)], deadline_s=0.2)
    finally:
        release.set()
    assert (first, last) == (1.0, 1.0)
    assert isinstance(late, LateRewardError)
    assert str(late) == "`python:mine` did not return within `task.reward_seconds = 0.2`"


def test_no_more_threads_hang_than_the_limit_and_then_items_fail_at_once() -> None:
    release = threading.Event()
    calls = []

    def mine(prompt: str, completion: str) -> float:
        calls.append(1)
        release.wait(PATIENCE_S)
        return 1.0

    try:
        outcomes = scores(mine, [{}] * 9, deadline_s=0.1, threads=2, most_abandoned=4)
    finally:
        release.set()
    assert all(isinstance(outcome, RewardError) for outcome in outcomes)
    assert len(calls) == 4
    assert sum(isinstance(outcome, LateRewardError) for outcome in outcomes) == 4
    assert "4 such calls hang" in str(outcomes[-1])


def test_an_async_reward_scores_many_at_once_and_is_cancelled_at_its_deadline() -> None:
    at_once, most, cancelled = 0, 0, []

    async def mine(prompt: str, completion: str, seconds: float) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(seconds)
            raise
        finally:
            at_once -= 1
        return 1.0

    *fine, late = scores(mine, [*[{"seconds": 0.05}] * 20, {"seconds": PATIENCE_S}], deadline_s=2.0)
    assert fine == [1.0] * 20
    assert most == 21
    assert isinstance(late, LateRewardError)
    assert cancelled == [PATIENCE_S]


def test_an_async_reward_that_blocks_costs_its_thread_and_the_others_are_scored_again() -> None:
    release = threading.Event()

    async def mine(prompt: str, completion: str, blocks: bool) -> float:
        if blocks:
            release.wait(PATIENCE_S)
        return 1.0

    async def story() -> tuple[BaseException | float, float]:
        rewards = ThreadRewards("python:mine", {"": mine}, deadline_s=0.3)
        await rewards.start()
        try:
            blocked = asyncio.create_task(rewards.score("p", "c", {"blocks": True}))
            await asyncio.sleep(1.0)
            other = await rewards.score("p", "c", {"blocks": False})
            assert rewards.num_abandoned == 1
            return (await asyncio.gather(blocked, return_exceptions=True))[0], other
        finally:
            await rewards.close()

    try:
        blocked, other = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    finally:
        release.set()
    assert isinstance(blocked, LateRewardError)
    assert other == 1.0


def test_a_function_that_cannot_take_the_columns_is_refused_at_the_start() -> None:
    def mine(prompt: str, completion: str, answer: str) -> float:
        return 1.0

    for columns, words in (
        ({"label": None}, "write `def mine(prompt, completion, **row)`"),
        ({"answer": "row 3 of `data`"}, "takes the column `answer`, which row 3 of `data` does not have"),
    ):
        with pytest.raises(RecipeError, match="`reward` cannot be used") as raised:
            scores(mine, [], columns=columns)
        assert words in str(raised.value)


def test_what_is_not_scored_at_the_end_fails() -> None:
    release, entered = threading.Event(), threading.Event()

    def mine(prompt: str, completion: str) -> float:
        entered.set()
        release.wait(PATIENCE_S)
        return 1.0

    async def story() -> None:
        rewards = ThreadRewards("python:mine", {"": mine})
        with pytest.raises(RewardError, match="not running"):
            await rewards.score("p", "c", {})
        await rewards.start()
        asked = asyncio.create_task(rewards.score("p", "c", {}))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        await rewards.close()
        with pytest.raises(RewardError, match="was stopped before it returned"):
            await asked

    asyncio.run(story())
    release.set()
