"""Environments in a thread of this process: they may block, and a hung one is abandoned."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.protocol import Environment, Outcome
from stretto.environments.thread_episodes import ThreadEpisodes
from stretto.errors import LateRewardError, RecipeError, RewardError
from stretto.types import Completion, Prompt

PATIENCE_S = 30.0
PROMPT = Prompt(0, "1", (1,), {"row": "mine"})


class Asked:
    """A policy that answers at once, in the thread of the run."""

    left = 7
    budget_left = 1.0

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.spent = 0.0
        self.reported: float | Outcome | None = None

    async def generate(self, tokens: Any, *, lineage: int = 0, train: bool = True) -> Completion:
        self.threads.append(threading.get_ident())
        await asyncio.sleep(0)
        if len(tokens) > 3:
            raise RewardError("too long")
        return Completion(0, 0, np.array([5], np.int32), np.array([-0.5], np.float32), "stop", "checksum")

    def spend(self, amount: float, what: str = "") -> None:
        self.spent += amount

    def report(self, reward: float | Outcome) -> None:
        self.reported = reward


class TwoTurns:
    def __init__(self) -> None:
        self.started_in = 0
        self.closed = False

    async def start(self) -> None:
        self.started_in = threading.get_ident()

    async def close(self) -> None:
        self.closed = True

    async def episode(self, prompt: Prompt, policy: Any) -> float:
        assert threading.get_ident() == self.started_in
        time.sleep(0.05)  # blocks its thread alone
        first = await policy.generate(prompt.tokens)
        policy.spend(0.25)
        policy.report(0.5)
        await policy.generate((*prompt.tokens, *first.tokens.tolist()))
        return float(policy.left) + policy.budget_left


def play(
    make: Callable[[], Environment], story: Callable[[ThreadEpisodes], Any], hang_s: float = 10.0, **options: Any
) -> Any:
    async def run() -> Any:
        episodes = ThreadEpisodes(make, hang_s=hang_s, **options)
        await episodes.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await story(episodes)
        finally:
            await episodes.close()
            await episodes.close()

    return asyncio.run(run())


def test_episodes_run_in_another_thread_and_their_turns_in_that_of_the_run() -> None:
    environment, policies = TwoTurns(), [Asked() for _ in range(3)]

    async def story(episodes: ThreadEpisodes) -> list[Any]:
        return await asyncio.gather(*(episodes.episode(PROMPT, policy) for policy in policies))

    assert play(lambda: environment, story) == [8.0] * 3
    assert environment.started_in != threading.get_ident()
    assert environment.closed
    for policy in policies:
        assert policy.threads == [threading.get_ident()] * 2
        assert (policy.spent, policy.reported) == (0.25, 0.5)


def test_an_error_of_an_episode_and_one_of_a_turn_reach_the_run() -> None:
    class Fails:
        async def episode(self, prompt: Prompt, policy: Any) -> float:
            if prompt.text == "exit":
                raise SystemExit(1)
            await policy.generate((1, 2, 3, 4))
            return 1.0

    async def story(episodes: ThreadEpisodes) -> list[Any]:
        prompts = (PROMPT, Prompt(1, "exit", (1,), {}))
        return await asyncio.gather(*(episodes.episode(each, Asked()) for each in prompts), return_exceptions=True)

    turn, exited = play(Fails, story)
    assert isinstance(turn, RewardError)
    assert str(turn) == "too long"
    assert "called `sys.exit(1)`" in str(exited)


def test_an_episode_that_is_cancelled_is_not_waited_for_and_ends_its_turn() -> None:
    ended = threading.Event()

    class Waits:
        async def episode(self, prompt: Prompt, policy: Any) -> float:
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                ended.set()
            return 1.0

    async def story(episodes: ThreadEpisodes) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episodes.episode(PROMPT, Asked()), 0.1)
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)

    play(Waits, story)


def test_a_hung_thread_is_replaced_and_its_episodes_are_late() -> None:
    release, made = threading.Event(), []

    class Hangs:
        def __init__(self) -> None:
            made.append(self)

        async def episode(self, prompt: Prompt, policy: Any) -> float:
            if len(made) == 1:
                release.wait(PATIENCE_S)
            return float(len(made))

    async def story(episodes: ThreadEpisodes) -> tuple[Any, Any]:
        outcomes = await asyncio.gather(*(episodes.episode(PROMPT, Asked()) for _ in range(2)), return_exceptions=True)
        again = await episodes.episode(PROMPT, Asked())
        assert episodes.num_abandoned == 1
        return outcomes, again

    try:
        outcomes, again = play(Hangs, story, hang_s=0.5)
    finally:
        release.set()
    assert [type(outcome) for outcome in outcomes] == [LateRewardError] * 2
    assert "has blocked its thread for 0.5 s" in str(outcomes[0])
    assert again == 2.0


def test_no_more_threads_hang_than_the_limit() -> None:
    release = threading.Event()

    class Hangs:
        async def episode(self, prompt: Prompt, policy: Any) -> float:
            release.wait(PATIENCE_S)
            return 1.0

    async def story(episodes: ThreadEpisodes) -> str:
        with pytest.raises(LateRewardError):
            await episodes.episode(PROMPT, Asked())
        with pytest.raises(RewardError, match="1 threads of the environment hang"):
            await episodes.episode(PROMPT, Asked())
        release.set()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return str(await episodes.episode(PROMPT, Asked()))
                except RewardError:
                    await asyncio.sleep(0.05)

    assert play(Hangs, story, hang_s=0.4, most_abandoned=1) == "1.0"


def test_an_object_or_a_class_that_was_given_is_loaded_with_the_checks_of_one_that_is_named() -> None:
    class Mine:
        def __init__(self, tokenizer: object, depth: int = 1) -> None:
            self.depth = depth

        async def episode(self, prompt: Prompt, policy: Any) -> float:
            return 1.0

    ready: Any = Mine(None)
    assert load_environment(EnvironmentSpec("python:Mine", 2, {}, 1, ready), None) is ready
    made: Any = load_environment(EnvironmentSpec("python:Mine", 2, {"depth": 3}, 1, Mine), None)
    assert made.depth == 3
    for spec, words in (
        (
            EnvironmentSpec("python:Mine", 2, {"depth": 3}, 1, ready),
            "has no effect on `task.environment = 'python:Mine'`",
        ),
        (EnvironmentSpec("python:Mine", 2, {"width": 3}, 1, Mine), "cannot be called with the tokenizer"),
        (EnvironmentSpec("python:object", 2, {}, 1, lambda tokenizer: object()), "has no episodes"),
    ):
        with pytest.raises(RecipeError) as raised:
            load_environment(spec, None)
        assert words in str(raised.value)
