"""Episodes on a cluster: those of a local run, and another actor when theirs dies."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from episode_cases import FOLDER, Game, play_all, played_here
from ray_cases import small_cluster

from stretto.cluster import actor_calls
from stretto.cluster.actor_calls import ActorCalls, CallServer
from stretto.cluster.episodes import EpisodeActor, EpisodeOptions, RayEpisodes
from stretto.environments.custom import EnvironmentSpec
from stretto.environments.episode_pool import EpisodePoolOptions
from stretto.environments.protocol import Outcome
from stretto.errors import LateRewardError, RecipeError, RewardError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def options_of(name: str = "Talks") -> EpisodeOptions:
    spec = EnvironmentSpec(f"episode_environments:{name}", 4, {}, 4)
    return EpisodeOptions(EpisodePoolOptions(spec, pickle.dumps(None), workers=1, hang_s=60.0), FOLDER)


def episodes(name: str = "Talks") -> RayEpisodes:
    return RayEpisodes(options_of(name), said=lambda line: None, instance_seconds=20.0)


class Here:
    """An actor in this process: its methods as Ray has them."""

    def __init__(self, server: CallServer) -> None:
        async def deliver(messages: Any) -> None:
            server.deliver(messages)

        self.deliver = type("Method", (), {"remote": staticmethod(deliver)})
        self.collect = type("Method", (), {"remote": staticmethod(server.collect)})


@asynccontextmanager
async def played_by_an_actor_here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RayEpisodes, CallServer]]:
    """Episodes of an actor that runs in this process, and its side of the calls."""
    monkeypatch.setattr(actor_calls, "kill", lambda actor: None)
    actor = EpisodeActor(options_of(), FOLDER, 5.0)
    pool, handlers = actor.make_pool()
    await pool.start()
    server = CallServer(handlers, status=lambda: None, report_s=5.0, idle_s=5.0)
    environment = episodes()
    remote = environment._host._remote = ActorCalls(Here(server), "the actor", deadline_s=20.0)
    try:
        yield environment, server
    finally:
        await remote.close()
        await pool.close()


def test_an_episode_may_spend_while_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with played_by_an_actor_here(monkeypatch) as (environment, _):
            game = Game(0, "spend meanwhile", budget=3.0)
            assert isinstance(await game.play(environment), Outcome)
            assert game.episode.spending.spent == 1.0

    asyncio.run(run())


def test_an_episode_that_is_cancelled_leaves_no_call_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with played_by_an_actor_here(monkeypatch) as (environment, server):
            games = [Game(number, "wait") for number in range(3)]
            pending = asyncio.ensure_future(play_all(environment, games))
            while any(not game.turns.done for game in games):
                await asyncio.sleep(0.02)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            remote = environment._host._remote
            assert remote is not None
            async with asyncio.timeout(20):
                while server._tasks or remote._pending:
                    await asyncio.sleep(0.02)

    asyncio.run(run())


def test_episodes_on_the_cluster_are_those_of_the_driver_and_a_lost_actor_costs_no_turn() -> None:
    async def run() -> None:
        remotely = [Game(number, turns=1 + number % 4) for number in range(20)]
        locally = [Game(number, turns=1 + number % 4) for number in range(20)]
        environment = episodes()
        await environment.start()
        try:
            outcomes = await play_all(environment, remotely)
            assert outcomes == await play_all(played_here(), locally)
            assert [game.story for game in remotely] == [game.story for game in locally]
            failed, spends, late, cut = await play_all(
                environment,
                [
                    Game(0, "raise"),
                    game := Game(1, "spend", budget=3.0),
                    Game(2, "wait", seconds=3.0),
                    Game(3, "report", seconds=3.0),
                ],
            )
            assert isinstance(failed, RewardError)
            assert "no such world" in str(failed)
            assert isinstance(spends, Outcome)
            assert (game.episode.spending.spent, game.episode.spending.refused) == (2.0, True)
            assert isinstance(late, LateRewardError)
            assert isinstance(cut, Outcome)
            waiting = [Game(number, "wait") for number in range(3)]
            pending = asyncio.ensure_future(play_all(environment, waiting))
            while any(not game.turns.done for game in waiting):
                await asyncio.sleep(0.02)
            remote = environment._host._remote
            assert remote is not None
            ray.kill(remote.actor)
            assert isinstance(await Game(6).play(environment), Outcome)
            assert environment.replaced == 1
            assert not pending.done(), "they were begun again"
            assert [game.generated for game in waiting] == [1] * 3
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        finally:
            await environment.close()

    asyncio.run(run())


def test_an_environment_that_cannot_be_imported_is_refused_by_name() -> None:
    async def run() -> None:
        environment = episodes("Nothing")
        try:
            await environment.start()
        finally:
            await environment.close()

    with pytest.raises(RecipeError, match="episode_environments:Nothing"):
        asyncio.run(run())
