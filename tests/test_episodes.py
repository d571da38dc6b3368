"""One run of an episode: what an environment does with its turns that it must not do, and what is left behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from stretto.environments.protocol import Policy
from stretto.episodes import Episode
from stretto.errors import RequestError, RewardError
from stretto.types import Completion, Prompt

PROMPT = Prompt(0, "text", (1, 2), {})
TURN = Completion(0, 0, np.array([3], np.int32), np.zeros(1, np.float32), "stop", "sum")


class Asked:
    """A policy whose turns take `takes_s`; it keeps how each of them ended."""

    left = 8

    def __init__(self, takes_s: float = 0.0, deadline_s: float | None = None, fault: Exception | None = None) -> None:
        self.episode = Episode(deadline_s)
        self.ended: list[str] = []
        self._takes_s, self._fault = takes_s, fault

    async def generate(self, tokens: Sequence[int]) -> Completion:
        return await self.episode.ask(self._turn)

    async def _turn(self) -> Completion:
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        if self._fault is not None:
            raise self._fault
        self.ended.append("done")
        return TURN


class Plays:
    def __init__(self, episode: Callable[[Policy], Coroutine[Any, Any, float]]) -> None:
        self._episode = episode

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        return await self._episode(policy)


def play(policy: Asked, episode: Callable[[Policy], Coroutine[Any, Any, float]]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(5):
            return await policy.episode.play(Plays(episode), PROMPT, policy)

    return asyncio.run(run())


def test_turns_one_after_the_other_are_what_was_asked_for() -> None:
    async def episode(policy: Policy) -> float:
        return float((await policy.generate((1,))).tokens[0] + (await policy.generate((1,))).tokens[0])

    assert play(policy := Asked(), episode) == 6.0
    assert policy.ended == ["done", "done"]


def test_two_turns_at_once_are_refused_and_none_is_left_behind() -> None:
    async def episode(policy: Policy) -> float:
        results = await asyncio.gather(policy.generate((1,)), policy.generate((1,)), return_exceptions=True)
        return float(len(results))

    async def impatient(policy: Policy) -> float:
        await asyncio.gather(policy.generate((1,)), policy.generate((1,)))
        return 1.0

    for each, ended in ((episode, ["done"]), (impatient, ["cancelled"])):
        policy = Asked(takes_s=0.01)
        with pytest.raises(RewardError, match="before the last one was done"):
            play(policy, each)
        assert policy.ended == ended


def test_a_turn_that_is_given_up_fails_the_episode() -> None:
    async def episode(policy: Policy) -> float:
        try:
            await asyncio.wait_for(policy.generate((1,)), 0.01)
        except TimeoutError:
            return 1.0
        return 0.0

    with pytest.raises(RewardError, match="gave up a turn"):
        play(policy := Asked(takes_s=5), episode)
    assert policy.ended == ["cancelled"]


def test_an_episode_that_returns_before_its_turn_is_done_fails() -> None:
    async def episode(policy: Policy) -> float:
        tasks.append(asyncio.create_task(policy.generate((1,))))
        await asyncio.sleep(0.01)
        return 1.0

    tasks: list[asyncio.Task[Completion]] = []
    with pytest.raises(RewardError, match="returned before that was done"):
        play(policy := Asked(takes_s=5), episode)
    assert policy.ended == ["cancelled"]


def test_what_an_environment_raises_beside_its_turn_is_what_is_told() -> None:
    async def tool() -> None:
        await asyncio.sleep(0.01)
        raise KeyError("tool")

    async def episode(policy: Policy) -> float:
        await asyncio.gather(policy.generate((1,)), tool())
        return 1.0

    with pytest.raises(KeyError, match="tool"):
        play(policy := Asked(takes_s=5), episode)
    assert policy.ended == ["cancelled"]


def test_a_turn_after_the_end_is_refused() -> None:
    async def episode(policy: Policy) -> float:
        return 1.0

    async def run() -> None:
        assert await policy.episode.play(Plays(episode), PROMPT, policy) == 1.0
        with pytest.raises(RewardError, match="had ended"):
            await policy.generate((1,))

    policy = Asked(deadline_s=1.0)
    asyncio.run(run())
    assert not policy.ended


@pytest.mark.parametrize("fault", [None, RequestError("no"), RewardError("not so")])
def test_the_deadline_holds_whatever_a_turn_came_to_and_not_while_it_is_made(fault: Exception | None) -> None:
    async def episode(policy: Policy) -> float:
        with contextlib.suppress(Exception):
            await policy.generate((1,))
        await asyncio.Event().wait()
        return 1.0

    policy = Asked(takes_s=0.2, deadline_s=0.05, fault=fault)
    said = "no" if isinstance(fault, RequestError) else r"for 0.05 s since its last token \(`runtime.stall_seconds`"
    with pytest.raises(RequestError if isinstance(fault, RequestError) else RewardError, match=said):
        play(policy, episode)
    assert policy.ended == ([] if fault else ["done"])


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SystemExit(3), r"the environment called `sys.exit\(3\)`"),
        (asyncio.CancelledError(), "raised `CancelledError`, and nobody had cancelled it"),
    ],
)
def test_an_environment_that_exits_or_cancels_itself_fails_its_episode_alone(raised: BaseException, said: str) -> None:
    async def episode(policy: Policy) -> float:
        await policy.generate((1,))
        raise raised

    with pytest.raises(RewardError, match=said):
        play(Asked(), episode)


def test_who_cancels_an_episode_finds_it_cancelled() -> None:
    async def episode(policy: Policy) -> float:
        await asyncio.sleep(60)
        return 0.0

    async def run() -> None:
        policy = Asked()
        playing = asyncio.create_task(policy.episode.play(Plays(episode), PROMPT, policy))
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(run())
