"""Episodes in worker processes: the same as in the driver's, and environments that hang, die, leak and lie."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from episode_cases import FOLDER, Game, play_all, played_here
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments import episode_pool
from stretto.environments.custom import EnvironmentSpec
from stretto.environments.episode_pipes import Ask, Ended, Failed, FromWorker, Reported, Spent, frame_of, read_message
from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions, default_workers
from stretto.environments.protocol import Outcome
from stretto.environments.reward_pipes import LENGTH, BrokenFrameError
from stretto.environments.sandbox import Limits
from stretto.environments.worker_process import WorkerOptions
from stretto.errors import LateRewardError, RecipeError, RewardError


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


@asynccontextmanager
async def pool(
    name: str = "Talks",
    config: dict[str, Any] | None = None,
    *,
    said: Callable[[str], None] = lambda line: None,
    sandbox: Limits | None = None,
    **options: Any,
) -> AsyncIterator[EpisodePool]:
    spec = EnvironmentSpec(f"episode_environments:{name}", 4, config or {}, 4)
    asked = EpisodePoolOptions(spec, pickle.dumps(None), **{"workers": 1, "hang_s": 60.0, **options})
    made = EpisodePool(asked, WorkerOptions(said, {}, sandbox))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


# -- the same as in the driver's process -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Talks", "Branches"])
def test_episodes_ask_for_the_same_tokens_and_earn_the_same_as_in_the_driver(name: str) -> None:
    def games() -> list[Game]:
        return [Game(number, turns=1 + number % 4) for number in range(40)]

    async def run() -> None:
        locally, remotely = games(), games()
        async with pool(name, workers=2) as it:
            assert await play_all(it, remotely) == await play_all(played_here(name), locally)
            assert len(it.memory) == 2
        assert [game.story for game in remotely] == [game.story for game in locally]

    asyncio.run(run())


def test_thousands_of_short_episodes_are_in_flight_at_once_over_few_processes() -> None:
    async def run() -> None:
        games = [Game(number) for number in range(3_000)]
        async with pool(workers=2) as it:
            outcomes = await play_all(it, games)
            assert it.replaced == 0
        assert [len(outcome.turns) for outcome in outcomes] == [2] * 3_000
        assert all(game.generated == 2 for game in games)

    asyncio.run(run())


def test_an_episode_that_runs_into_its_tokens_gets_the_same_error_and_sees_what_is_left() -> None:
    async def run() -> None:
        remotely, locally = Game(3, turns=4, max_tokens=3), Game(3, turns=4, max_tokens=3)
        async with pool() as it:
            assert await remotely.play(it) == await locally.play(played_here())
            with pytest.raises(RewardError, match="asked for turn 4, counted from 0, and its episodes have 4 at most"):
                await Game(3, turns=5).play(it)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", r"`episode_environments:Talks` raised KeyError: 'no such world' \(episode_environments.py:\d+\)"),
        ("exit", r"called `sys.exit\(3\)`"),
        ("none", "returned None for a reward: return a finite number"),
        ("two at once", "before the last one was done: await one after the other"),
        ("give up", "gave up a turn that it had asked for"),
        ("letters", "a context that is not all token ids"),
        ("large token", "a number that is no token id"),
        ("huge", "a context of 5,000,000 tokens; more than"),
        ("cancel itself", "raised `CancelledError`, and nobody had cancelled it"),
    ],
)
def test_an_episode_that_fails_fails_alone_and_says_why(does: str, said: str) -> None:
    async def run() -> None:
        async with pool() as it:
            failed, *fine = await play_all(it, [Game(0, does), Game(1), Game(2)])
            assert it.replaced == 0
        assert all(isinstance(outcome, Outcome) for outcome in fine)
        with pytest.raises(RewardError, match=said):
            raise failed

    asyncio.run(run())


# -- workers that are lost ---------------------------------------------------------------------------------------------


def test_an_episode_that_blocks_its_event_loop_fails_alone_and_its_neighbours_generate_nothing_twice() -> None:
    async def run() -> None:
        games = [Game(0, "block"), *(Game(number, turns=4) for number in range(1, 20))]
        waiting = [Game(number, "wait") for number in range(20, 22)]
        async with pool(hang_s=3.0) as it:
            pending = asyncio.ensure_future(play_all(it, waiting))
            await asyncio.sleep(0)
            late, *fine = await play_all(it, games)
            assert it.replaced == 1
            assert not pending.done(), "they were begun again on the next worker, and wait there"
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        assert isinstance(late, LateRewardError)
        assert "blocked the event loop of its worker for 3 s" in str(late)
        assert all(isinstance(outcome, Outcome) for outcome in fine), fine
        assert [game.generated for game in [*games[1:], *waiting]] == [4] * 19 + [1] * 2

    asyncio.run(run())


@pytest.mark.parametrize(("does", "said"), [("quit", "ended its process with exit code 7"), ("killed", "SIGKILL")])
def test_an_episode_that_ends_its_process_fails_alone(does: str, said: str) -> None:
    async def run() -> None:
        games = [Game(0, does), *(Game(number, turns=4) for number in range(1, 20))]
        async with pool() as it:
            failed, *fine = await play_all(it, games)
            assert it.replaced == 1
        assert isinstance(failed, RewardError)
        assert said in str(failed)
        assert "in this episode" in str(failed)
        assert all(isinstance(outcome, Outcome) for outcome in fine), fine
        assert all(game.generated == 4 for game in games[1:])

    asyncio.run(run())


def test_a_worker_that_is_killed_from_outside_fails_its_episodes_and_never_with_a_reward() -> None:
    async def run() -> None:
        games = [Game(number, "wait") for number in range(5)]
        async with pool() as it:
            pending = asyncio.ensure_future(play_all(it, games))
            while any(not game.turns.done for game in games):
                await asyncio.sleep(0.01)
            (pid,) = it.memory
            os.kill(pid, signal.SIGKILL)
            outcomes = await pending
            assert it.replaced == 1
            assert isinstance(await Game(6).play(it), Outcome), "another worker has taken its place"
        for outcome in outcomes:
            assert isinstance(outcome, RewardError)
            assert "was ended by SIGKILL, with 5 episodes in progress" in str(outcome)

    asyncio.run(run())


def test_an_episode_that_loses_too_many_workers_to_others_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_pool, "RERUNS", 1)

    async def run() -> None:
        async with pool() as it:
            _, other = await play_all(it, [Game(0, "quit"), Game(1, "wait")])
        assert isinstance(other, RewardError)
        assert "1 workers were lost to other episodes" in str(other)

    asyncio.run(run())


def test_a_worker_that_writes_garbage_to_its_pipe_is_replaced() -> None:
    async def run() -> None:
        async with pool() as it:
            (failed,) = await play_all(it, [Game(0, "garbage")])
            assert it.replaced == 1
            assert isinstance(await Game(1).play(it), Outcome)
        assert isinstance(failed, RewardError)
        assert "wrote something else than messages to its pipe" in str(failed)

    asyncio.run(run())


def test_a_process_that_an_environment_forks_plays_nothing() -> None:
    async def run() -> None:
        games = [Game(number, "fork") for number in range(3)]
        async with pool() as it:
            outcomes = await play_all(it, games)
            assert it.replaced == 0
        assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
        assert [game.generated for game in games] == [2] * 3

    asyncio.run(run())


def test_a_worker_that_leaks_is_replaced_between_episodes_and_costs_none() -> None:
    async def run() -> None:
        async with pool(max_bytes=200 << 20, hang_s=3.0) as it:
            (first,) = it.memory
            while first in it.memory:
                assert isinstance(await Game(0, "leak").play(it), Outcome)
            assert it.retired >= 1
            assert it.replaced == 0

    asyncio.run(run())


def test_a_worker_that_takes_twice_its_memory_is_killed() -> None:
    async def run() -> None:
        async with pool(max_bytes=100 << 20, hang_s=10.0) as it:
            outcomes = await play_all(it, [Game(0, "hog"), Game(1, "wait")])
            assert isinstance(await Game(2).play(it), Outcome)
        for outcome in outcomes:  # both: a step that runs when its memory is seen may be of either
            with pytest.raises(RewardError, match=r"took 0.\d GiB, more than twice `task.worker_gib = 0.0976562`"):
                raise outcome

    asyncio.run(run())


def test_a_worker_whose_cancelled_episode_goes_on_is_replaced_and_costs_no_other() -> None:
    async def run() -> None:
        said: list[str] = []
        async with pool(hang_s=3.0, said=said.append) as it:
            (first,) = it.memory
            waiting = asyncio.ensure_future(Game(0, "wait").play(it))
            playing = asyncio.ensure_future(Game(1, "stubborn").play(it))
            while not said:
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            while not it.retired:
                await asyncio.sleep(0.05)
            assert isinstance(await Game(2).play(it), Outcome)
            assert len(it.memory) == 2, "the first has an episode left"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            while first in it.memory:
                await asyncio.sleep(0.05)
            assert it.replaced == 0

    asyncio.run(run())


def test_a_worker_in_which_many_calls_of_tools_hang_is_replaced_and_costs_no_episode() -> None:
    async def run() -> None:
        said: list[str] = []
        async with pool(hang_s=3.0) as it:
            it._notice = said.append
            (first,) = it.memory
            assert isinstance(await Game(0, "hanging tools").play(it), Outcome)
            while first in it.memory:
                await asyncio.sleep(0.05)
            assert isinstance(await Game(1).play(it), Outcome)
            assert (it.retired, it.replaced) == (1, 0)
        assert "32 calls of tools hang" in said[0]

    asyncio.run(run())


def test_no_episode_begins_on_a_worker_that_is_dead_or_blocked() -> None:
    async def run() -> None:
        async with pool(workers=2, hang_s=30.0) as it:
            blocks = asyncio.ensure_future((game := Game(0, "block")).play(it))
            while not game.turns.done or not any(it._is_blocked(worker) for worker in it._workers):
                await asyncio.sleep(0.05)
            for number in range(1, 6):
                assert isinstance(await Game(number).play(it), Outcome)
            blocks.cancel()
            await asyncio.gather(blocks, return_exceptions=True)
            for worker in list(it._workers):
                worker.process.kill()
            while it._workers:
                await asyncio.sleep(0)
            assert isinstance(await Game(7).play(it), Outcome), "it waits for another worker"

    asyncio.run(run())


def test_a_worker_is_replaced_after_so_many_episodes_and_finishes_those_that_it_has() -> None:
    async def run() -> None:
        async with pool(max_episodes=10) as it:
            outcomes = await play_all(it, [Game(number) for number in range(35)])
            assert (it.retired, it.replaced) == (3, 0)
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)

    asyncio.run(run())


def test_an_environment_that_floods_its_output_is_heard_and_goes_on() -> None:
    async def run() -> int:
        lines: list[str] = []
        async with pool(said=lines.append) as it:
            assert isinstance(await Game(0, "flood").play(it), Outcome)
        return len(lines)

    assert asyncio.run(run()) == 20_000


# -- the start and the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no disk')", "importing `broken` failed: OSError: no disk"),
        ("import os\nos._exit(4)", "cannot be used: it ended its process with exit code 4 while it was imported"),
        ("import os\nos.fork()\nclass Mine:\n    def __init__(self, t): pass", "has no episodes: define"),
        (
            "class Mine:\n    def __init__(self, t):\n        raise ValueError('no')",
            "could not be created: ValueError: no",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_by_name(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        options = EpisodePoolOptions(EnvironmentSpec("broken:Mine", 1), pickle.dumps(None), workers=2)
        await EpisodePool(options, WorkerOptions(lambda line: None)).start()

    with pytest.raises(RecipeError, match=f"`task.environment = 'broken:Mine'`.*{said}"):
        asyncio.run(run())


def test_an_environment_is_started_before_its_first_episode_and_closed_after_its_last(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    async def run() -> None:
        async with pool("Begins", {"path": str(notes)}) as it:
            assert await Game(0).play(it) == 1.0

    asyncio.run(run())
    assert notes.read_text().split() == ["start", "episode", "close"]

    async def several() -> None:
        async with pool("Begins", {"path": str(notes)}, max_episodes=1) as it:
            assert await play_all(it, [Game(0), Game(1)]) == [1.0, 1.0]

    notes.unlink()
    asyncio.run(several())
    assert notes.read_text().split().count("close") >= 2, "each that was replaced; the last may not have started"

    async def fails() -> None:
        async with pool("Begins", {"path": str(notes), "fails": True}):
            pass

    with pytest.raises(RecipeError, match="could not be started: ConnectionError: no world today"):
        asyncio.run(fails())


def test_the_end_of_the_pool_ends_its_processes_and_its_episodes() -> None:
    async def run() -> list[int]:
        async with pool(workers=2) as it:
            pids = list(it.memory)
            pending = asyncio.ensure_future(play_all(it, [Game(0, "wait"), Game(1, "stubborn")]))
            await asyncio.sleep(0.05)
        for outcome in await pending:
            assert isinstance(outcome, RewardError)
        with pytest.raises(RewardError, match="while its workers were not running"):
            await Game(2).play(it)
        return pids

    for pid in asyncio.run(run()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_episode_that_is_cancelled_is_cancelled_in_its_worker_too() -> None:
    async def run() -> None:
        said: list[str] = []
        async with pool(said=said.append) as it:
            for does in ("wait", "stubborn"):
                playing = asyncio.ensure_future((game := Game(0, does)).play(it))
                while not game.turns.done or (does == "stubborn" and not said):
                    await asyncio.sleep(0.01)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                assert isinstance(await Game(1).play(it), Outcome)
            (worker,) = it._workers
            assert not worker.sessions
            assert len(worker.cancelled) == 1, "the one that ignores its cancellation; it holds no turn"

    asyncio.run(run())


def test_a_worker_ends_with_a_pool_that_was_killed_even_if_its_event_loop_is_blocked() -> None:
    program = f"""
        import asyncio, pickle, sys
        sys.path.insert(0, {FOLDER!r})
        from episode_cases import Game
        from stretto.environments.custom import EnvironmentSpec
        from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions
        from stretto.environments.worker_process import WorkerOptions

        async def run():
            spec = EnvironmentSpec("episode_environments:Talks", 4)
            options = EpisodePoolOptions(spec, pickle.dumps(None), workers=1)
            pool = EpisodePool(options, WorkerOptions(lambda line: print(line, flush=True)))
            await pool.start()
            print(*pool.memory, flush=True)
            await Game(0, "block").play(pool)

        asyncio.run(run())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert process.stdout.readline() == b"blocks\n"
        process.kill()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{worker}")


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="needs Linux")
def test_a_worker_in_a_sandbox_has_no_network(tmp_path: Path) -> None:
    async def run() -> None:
        limits = Limits(4 << 30, 64 << 20, 400)
        async with pool("Home", {"path": str(tmp_path / "file")}, sandbox=limits) as it:
            earned = await Game(0).play(it)
            assert earned >= 1.0  # without namespaces the file can be written

    asyncio.run(run())


# -- limits ------------------------------------------------------------------------------------------------------------


def test_spending_is_counted_and_refused_beyond_the_budget() -> None:
    async def run() -> None:
        async with pool() as it:
            for environment in (it, played_here()):
                game = Game(0, "spend", budget=3.0)
                assert isinstance(await game.play(environment), Outcome)
                assert (game.episode.spending.spent, game.episode.spending.refused) == (2.0, True)
                game = Game(0, "overspend", budget=3.0)
                with pytest.raises(RewardError, match=r"10 for all of it is more than .* of 3 \(`task.budget`\)"):
                    await game.play(environment)

    asyncio.run(run())


def test_an_episode_is_cut_after_its_seconds_with_the_reward_that_it_had_reported() -> None:
    async def run() -> None:
        async with pool() as it:
            for environment, seconds in ((it, 1.5), (played_here(), 0.2)):
                game = Game(0, "report", seconds=seconds)
                outcome = await game.play(environment)
                assert isinstance(outcome, Outcome)
                assert len(outcome.turns) == 1
                assert game.episode.cut
                with pytest.raises(LateRewardError, match=rf"`task.episode_seconds = {seconds}`, and has no reward"):
                    await Game(0, "wait", seconds=seconds).play(environment)

    asyncio.run(run())


# -- messages ----------------------------------------------------------------------------------------------------------

MESSAGES = st.one_of(
    st.builds(
        Ask,
        st.integers(0, 2**62),
        st.integers(-9, 99),
        st.booleans(),
        st.integers(0, 2**31),
        st.lists(st.integers(-(2**31), 2**31 - 1)).map(tuple),
    ),
    st.builds(Spent, st.integers(0, 9), st.floats(allow_nan=False), st.text(max_size=99)),
    st.builds(Reported, st.integers(0, 9), st.floats(allow_nan=False)),
    st.builds(Ended, st.integers(0, 9), st.lists(st.floats(allow_nan=False)).map(tuple).map(Outcome)),
    st.builds(Failed, st.integers(0, 9), st.text(max_size=99)),
)


@settings(max_examples=50, deadline=None)
@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: FromWorker) -> None:
    frame = frame_of(message)
    assert LENGTH.unpack(frame[: LENGTH.size]) == (len(frame) - LENGTH.size,)
    read = read_message(frame[LENGTH.size :])
    if isinstance(message, Spent | Failed):
        assert type(read) is type(message)  # surrogates of a text are replaced
    else:
        assert read == message


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64))
def test_garbage_is_a_message_or_refused(body: bytes) -> None:
    with suppress(BrokenFrameError):
        read_message(body)


def test_the_number_of_processes_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 1), (4, 1), (16, 4), (256, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert default_workers() == workers
