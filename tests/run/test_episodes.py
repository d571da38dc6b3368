"""One run of an episode: what an environment does with its turns that it must not do, and what is left behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from stretto.environments.protocol import Outcome, Policy
from stretto.environments.single_turn import SingleTurn
from stretto.errors import LateRewardError, RequestError, RewardError
from stretto.run.episodes import Episode
from stretto.run.turns import Turns
from stretto.types import Completion, Prompt

PROMPT = Prompt(0, "text", (1, 2), {})
TURN = Completion(0, 0, np.array([3], np.int32), np.zeros(1, np.float32), "stop", "sum")


class Asked:
    """An episode whose turns take `takes_s`; it keeps how each of them ended."""

    def __init__(
        self,
        takes_s: float = 0.0,
        deadline_s: float | None = None,
        fault: Exception | None = None,
        seconds: float | None = None,
    ) -> None:
        self.turns = Turns(PROMPT.tokens)
        self.episode = Episode(self.turns, self._turn, max_tokens=8, deadline_s=deadline_s, seconds=seconds)
        self.ended: list[str] = []
        self._takes_s, self._fault = takes_s, fault

    async def _turn(self, number: int, tokens: tuple[int, ...], lineage: int, train: bool) -> Completion:
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        if self._fault is not None:
            raise self._fault
        self.ended.append("done")
        self.turns.add(tokens, TURN, lineage, train)
        return TURN


class Plays:
    def __init__(self, episode: Callable[[Policy], Coroutine[Any, Any, float]]) -> None:
        self._episode = episode

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        return await self._episode(policy)


def play(policy: Asked, episode: Callable[[Policy], Coroutine[Any, Any, float]]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(5):
            return await policy.episode.play(Plays(episode), PROMPT)

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
        assert await policy.episode.play(Plays(episode), PROMPT) == 1.0
        with pytest.raises(RewardError, match="had ended"):
            await policy.episode.generate((1,))

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
        (KeyboardInterrupt("mine"), r"raised `KeyboardInterrupt: mine \(test_episodes.py:\d+\)`, which is not an"),
        (GeneratorExit(), r"raised `GeneratorExit \(test_episodes.py:\d+\)`"),
        (BaseException("bare"), r"raised `BaseException: bare"),
    ],
)
def test_an_environment_that_exits_or_cancels_itself_fails_its_episode_alone(raised: BaseException, said: str) -> None:
    async def episode(policy: Policy) -> float:
        await policy.generate((1,))
        raise raised

    with pytest.raises(RewardError, match=said):
        play(Asked(), episode)


@pytest.mark.parametrize("while_generating", [True, False])
def test_an_environment_that_cancels_its_own_task_fails_its_episode_alone(while_generating: bool) -> None:
    async def episode(policy: Policy) -> float:
        if not while_generating:
            await policy.generate((1,))
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await policy.generate((1,)) if while_generating else await asyncio.sleep(60)
        return 1.0

    said = "gave up a turn" if while_generating else "it cancelled its own task"
    with pytest.raises(RewardError, match=said):
        play(Asked(takes_s=60 if while_generating else 0), episode)


@pytest.mark.parametrize("asks", [True, False], ids=["asks for a turn", "returns"])
def test_a_process_that_an_environment_forks_ends_where_it_comes_back(asks: bool) -> None:
    children: list[int] = []

    async def forks(policy: Policy) -> float:
        if child := os.fork():
            children.append(child)
        elif asks:
            await policy.generate((1,))
        return 1.0

    assert play(Asked(), forks) == 1.0
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_who_cancels_an_episode_finds_it_cancelled() -> None:
    async def episode(policy: Policy) -> float:
        await asyncio.sleep(60)
        return 0.0

    async def run() -> None:
        policy = Asked()
        playing = asyncio.create_task(policy.episode.play(Plays(episode), PROMPT))
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(run())


# -- the direct path of one turn ---------------------------------------------------------------------------------------


class Scores:
    """A reward of 0.5 after `takes_s`, or what it raises."""

    def __init__(self, takes_s: float = 0.0, raises: BaseException | None = None) -> None:
        self._takes_s, self._raises = takes_s, raises
        self.asked: list[tuple[str, str]] = []

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any], details: object = None) -> float:
        self.asked.append((prompt, completion))
        await asyncio.sleep(self._takes_s)
        if self._raises is not None:
            raise self._raises
        return 0.5


def play_single(asked: Asked, scores: Scores) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(5):
            return await asked.episode.play(SingleTurn(scores, str), PROMPT)

    return asyncio.run(run())


def test_a_single_turn_environment_is_asked_for_the_score_alone() -> None:
    asked, scores = Asked(), Scores()
    assert play_single(asked, scores) == 0.5
    assert (asked.ended, asked.episode.num_asked, scores.asked) == (["done"], 1, [("text", "[3]")])


@pytest.mark.parametrize("direct", [True, False])
def test_the_direct_path_and_the_general_one_come_to_the_same(direct: bool) -> None:
    asked, scores = Asked(), Scores()
    environment = SingleTurn(scores, str)
    outcome = play_single(asked, scores) if direct else play(asked, partial(environment.episode, PROMPT))
    assert (outcome, asked.ended, asked.episode.num_asked) == (0.5, ["done"], 1)
    assert scores.asked == [("text", "[3]")]


def test_the_direct_path_has_the_deadline_while_it_scores_and_not_while_it_generates() -> None:
    assert play_single(Asked(takes_s=0.2, deadline_s=0.05), Scores()) == 0.5
    with pytest.raises(RewardError, match=r"has not returned for 0.05 s since its last token"):
        play_single(Asked(deadline_s=0.05), Scores(takes_s=5))


def test_only_scoring_is_the_environments_work() -> None:
    async def run() -> None:
        asked = Asked(takes_s=0.05)
        playing = asyncio.create_task(asked.episode.play(SingleTurn(Scores(takes_s=0.1), str), PROMPT))
        await asyncio.sleep(0.02)
        assert not asked.episode.environment_works
        while not asked.ended:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert asked.episode.environment_works
        await playing
        assert not asked.episode.environment_works

    asyncio.run(run())


@pytest.mark.parametrize("fault", [RequestError("no"), AssertionError("ours")])
def test_what_keeps_a_single_turn_from_its_tokens_is_no_fault_of_the_environment(fault: Exception) -> None:
    asked = Asked(fault=fault)
    with pytest.raises(type(fault), match=str(fault)):
        play_single(asked, Scores())
    assert asked.episode.fault is fault


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SystemExit(3), r"called `sys.exit\(3\)`"),
        (asyncio.CancelledError(), "nobody had cancelled it"),
        (KeyboardInterrupt(), "raised `KeyboardInterrupt"),
    ],
)
def test_a_score_that_exits_or_cancels_itself_fails_its_episode_alone(raised: BaseException, said: str) -> None:
    asked = Asked()
    with pytest.raises(RewardError, match=said):
        play_single(asked, Scores(raises=raised))
    assert asked.episode.fault is None


def test_seconds_count_while_the_environment_works_and_not_while_it_waits_for_tokens() -> None:
    async def episode(policy: Policy) -> float:
        for _ in range(3):
            await policy.generate((1,))
        return 2.0

    asked = Asked(takes_s=0.3, seconds=0.5)
    assert play(asked, episode) == 2.0
    assert not asked.episode.cut


def test_seconds_add_up_over_the_turns_and_the_last_report_counts() -> None:
    async def episode(policy: Policy) -> float:
        while True:
            await policy.generate((1,))
            policy.report(Outcome((1.0,)))
            await asyncio.sleep(0.1)

    asked = Asked(seconds=0.35)
    outcome = play(asked, episode)
    assert asked.episode.cut
    assert isinstance(outcome, Outcome)
    assert len(outcome.turns) == asked.episode.num_asked > 1
    assert outcome.turns[:2] == (1.0, 0.0), "turns after the report earned nothing"


def test_an_episode_that_is_cut_before_its_first_turn_or_report_has_no_reward() -> None:
    async def idle(policy: Policy) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def silent(policy: Policy) -> float:
        await policy.generate((1,))
        return await idle(policy)

    with pytest.raises(LateRewardError, match=r"`task.episode_seconds = 0.1`, before it had a turn"):
        play(Asked(seconds=0.1), idle)
    with pytest.raises(LateRewardError, match=r"and has no reward: call `policy.report\(reward\)`"):
        play(Asked(seconds=0.1), silent)
    with pytest.raises(LateRewardError, match=r"`runtime.stall_seconds`"):
        play(Asked(seconds=60.0, deadline_s=0.1), silent)


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_an_amount_that_cannot_be_spent_fails_the_episode(amount: float) -> None:
    async def episode(policy: Policy) -> float:
        await policy.generate((1,))
        policy.spend(amount, "nothing")
        return 1.0

    with pytest.raises(RewardError, match="spend a finite number that is not negative"):
        play(Asked(), episode)
