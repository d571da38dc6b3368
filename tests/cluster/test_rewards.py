"""Rewards on a cluster: those of a local run, and another machine when theirs dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from judge_cases import FakeJudge, Reply, running
from ray_cases import small_cluster

from stretto.cluster.rewards import RESCORES, RayRewards, RewardOptions
from stretto.cluster.worker_host import WorkerHost
from stretto.environments.grades import Grade
from stretto.environments.reward_calls import Details, RewardSpec, as_specs
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.errors import RecipeError, RewardError, ScoringHaltedError
from stretto.setup.scorers import judge_scorer
from stretto.types import RewardPart

REWARDS = """
import os, time

def process(prompt, completion, **row):
    print("scored", completion)
    return os.getppid()

def slow(prompt, completion, seconds):
    time.sleep(seconds)
    return float(os.getppid())

def variables(prompt, completion, **row):
    seen = {name: value for name, value in os.environ.items() if name.startswith(("RAY", "OUR"))}
    raise ValueError(" ".join(f"{name}={value}" for name, value in seen.items()))

def large(prompt, completion, **row):
    return 1e101

def forked(prompt, completion, **row):
    return 1.0 if os.fork() else 2.0

def bad(prompt, completion, **row):
    raise ValueError("no idea")

def batched(completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]

def absent(prompt, completion):
    return None
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


def rewards(
    folder: Path, function: str, said: list[str] | None = None, passed: Mapping[str, str] | None = None
) -> RayRewards:
    return several(folder, as_specs(f"cluster_rewards:{function}"), said, passed)


def several(
    folder: Path,
    specs: tuple[RewardSpec, ...],
    said: list[str] | None = None,
    passed: Mapping[str, str] | None = None,
) -> RayRewards:
    (folder / "cluster_rewards.py").write_text(REWARDS)
    chosen = RewardOptions(specs, 1, 20.0, None, str(folder), passed or {})
    return RayRewards(chosen, said=(said if said is not None else []).append, instance_seconds=10.0)


def test_several_rewards_come_back_with_their_parts(tmp_path: Path) -> None:
    specs = tuple(RewardSpec(name, f"cluster_rewards:{name}", 0.5) for name in ("batched", "absent"))

    async def main() -> float | Grade:
        pool = several(tmp_path, specs)
        await pool.start()
        try:
            return await pool.score("p", "c", {}, Details(None, bytes(12), 3))
        finally:
            await pool.close()

    assert asyncio.run(main()) == Grade(1.5, (RewardPart("batched", 0.5, 3.0), RewardPart("absent", 0.5, None)))


def test_rewards_are_computed_and_their_output_heard_and_a_lost_host_costs_no_reward(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        pool = rewards(tmp_path, "slow", said)
        await pool.start()
        first = await pool.score("p", "c", {"seconds": 0.0})
        pending = [asyncio.ensure_future(pool.score("p", "c", {"seconds": 0.3})) for _ in range(4)]
        await asyncio.sleep(0.5)
        os.kill(int(first), signal.SIGKILL)
        later = await asyncio.wait_for(asyncio.gather(*pending), 120.0)
        assert pool.replaced == 1
        assert int(first) not in {int(reward) for reward in later[2:]}
        with pytest.raises(RewardError, match=r"slow.*"):
            await pool.score("p", "c", {"seconds": "long"})
        await pool.close()
        await pool.close()
        with pytest.raises(RewardError, match="after it was stopped"):
            await pool.score("p", "c", {"seconds": 0.0})

    asyncio.run(main())


def test_what_a_reward_prints_is_heard_and_its_failures_are_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        pool = rewards(tmp_path, "process", said)
        await pool.start()
        assert await pool.score("p", "one", {}) > 0
        late = time.monotonic() + 20.0
        while not said and time.monotonic() < late:
            await asyncio.sleep(0.05)
        assert said == ["scored one"]
        await pool.close()

    asyncio.run(main())


def test_a_worker_on_the_cluster_sees_the_variables_that_the_recipe_names_and_none_of_ray(tmp_path: Path) -> None:
    async def main() -> None:
        pool = rewards(tmp_path, "variables", passed={"OUR_KEY": "secret"})
        await pool.start()
        with pytest.raises(RewardError, match=r"raised ValueError: OUR_KEY=secret \("):
            await pool.score("p", "one", {})
        await pool.close()
        assert "secret" not in repr(pool._options)

    asyncio.run(main())


def test_on_the_cluster_too_a_reward_has_a_bound_and_a_copy_of_its_process_no_say(tmp_path: Path) -> None:
    async def main() -> None:
        pool = rewards(tmp_path, "large")
        await pool.start()
        with pytest.raises(RewardError, match=r"returned 1e\+101 \(float\), beyond 1e\+09"):
            await pool.score("p", "one", {})
        await pool.close()
        pool = rewards(tmp_path, "forked")
        await pool.start()
        assert [await pool.score("p", "one", {}) for _ in range(5)] == [1.0] * 5
        await pool.close()

    asyncio.run(main())


def test_a_function_that_cannot_be_imported_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        pool = rewards(tmp_path, "nothing")
        with pytest.raises(RecipeError, match="nothing"):
            await pool.start()
        await pool.close()

    asyncio.run(main())
    assert ray.is_initialized()


def test_an_actor_that_cannot_be_replaced_halts_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nowhere(self: WorkerHost) -> None:
        raise TimeoutError("no machine has room")

    async def main() -> None:
        pool = rewards(tmp_path, "process")
        await pool.start()
        await pool.score("p", "c", {})
        assert pool._host._remote is not None
        ray.kill(pool._host._remote.actor)
        monkeypatch.setattr(WorkerHost, "_start", nowhere)
        with pytest.raises(ScoringHaltedError, match=r"could not be started on the cluster.*--resume"):
            await pool.score("p", "c", {})
        await pool.close()
        with pytest.raises(RewardError, match="after it was stopped"):
            await pool.score("p", "c", {})

    asyncio.run(asyncio.wait_for(main(), 120.0))


def test_a_judge_whose_actors_are_all_lost_halts_scoring(tmp_path: Path) -> None:
    async def main(server: FakeJudge) -> None:
        async with judging(server, tmp_path) as pool:
            reward = asyncio.create_task(pool.score("p", "c", {}))
            for lost in range(RESCORES + 1):
                while len(server.calls) <= lost:
                    await asyncio.sleep(0.05)
                assert pool._host._remote is not None
                ray.kill(pool._host._remote.actor)
            with pytest.raises(ScoringHaltedError, match=rf"`task\.judge` lost its process {RESCORES + 1} times"):
                await reward

    with running(FakeJudge(lambda body: Reply(delay_s=20.0))) as server:
        asyncio.run(asyncio.wait_for(main(server), 240.0))


@asynccontextmanager
async def judging(server: FakeJudge, folder: Path, **options: Any) -> AsyncIterator[RayRewards]:
    asked = JudgeOptions(address=server.url, model="judge", prompt="Rate {completion}.", scale=(0, 10), **options)
    built = judge_scorer(asked, "task.judge", folder)
    assert "sk-right" not in repr(built)
    pool = RayRewards(
        RewardOptions((RewardSpec("", built.spec, built=built),), 1, 20.0, {}, str(folder)),
        said=[].append,
        instance_seconds=10.0,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def test_a_judge_scores_on_a_cluster_and_halts_the_run_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-right")

    async def main(server: FakeJudge) -> None:
        async with judging(server, tmp_path, api_key_env="JUDGE_KEY") as pool:
            assert await pool.score("p", "c", {}) == 0.7
            assert pool.waiting == ""
            server.key = "another"
            with pytest.raises(ScoringHaltedError, match="`JUDGE_KEY`"):
                await pool.score("p", "d", {})

    with running(FakeJudge(key="sk-right")) as server:
        asyncio.run(main(server))
    assert (tmp_path / "judge.sqlite").is_file()


def test_a_spent_budget_of_a_judge_halts_the_run_from_a_cluster_too(tmp_path: Path) -> None:
    async def main(server: FakeJudge) -> None:
        async with judging(server, tmp_path, budget={"calls": 1}) as pool:
            assert await pool.score("p", "c", {}) == 0.7
            with pytest.raises(ScoringHaltedError, match=r"`task\.judge\.budget\.calls = 1`"):
                await pool.score("p", "d", {})

    with running(FakeJudge()) as server:
        asyncio.run(main(server))
        assert len(server.calls) == 1
