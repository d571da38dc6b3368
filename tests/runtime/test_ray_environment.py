"""Rewards on a cluster: those of a local run, and another machine when theirs dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from ray_cases import small_cluster
from stretto.errors import RecipeError, RewardError
from stretto.runtime.ray_environment import RayRewards, RewardOptions

REWARDS = """
import os, time

def process(prompt, completion, **row):
    print("scored", completion)
    return os.getppid()

def slow(prompt, completion, seconds):
    time.sleep(seconds)
    return float(os.getppid())

def bad(prompt, completion, **row):
    raise ValueError("no idea")
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


def rewards(folder: Path, function: str, said: list[str] | None = None, **options: float) -> RayRewards:
    (folder / "cluster_rewards.py").write_text(REWARDS)
    chosen = RewardOptions(f"cluster_rewards:{function}", 1, options.pop("deadline_s", 20.0), None, str(folder))
    return RayRewards(chosen, said=(said if said is not None else []).append, instance_seconds=10.0)


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


def test_a_function_that_cannot_be_imported_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        pool = rewards(tmp_path, "nothing")
        with pytest.raises(RecipeError, match="nothing"):
            await pool.start()
        await pool.close()

    asyncio.run(main())
    assert ray.is_initialized()
