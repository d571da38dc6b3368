"""What a reward costs the process that asks for it, in microseconds of its own processor time.

    python bench/rewards.py [--rewards 128] [--rounds 50] [--workers 1]

Rewards are asked for in rounds, as the end of a rollout step does, of the quickstart's reward function. The caller's
time is what counts: it is spent under the lock that decoding and training need.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time

from stretto.environments.countdown import REWARD, chain, problem_at
from stretto.environments.reward_pool import RewardPool


async def measure(num_rewards: int, num_rounds: int, workers: int) -> None:
    started = time.perf_counter()
    pool = RewardPool(REWARD, workers=workers)
    await pool.start()
    print(f"start of {workers} worker(s): {1e3 * (time.perf_counter() - started):.0f} ms")
    problems = [problem_at(index, 0, held_out=False) for index in range(num_rewards)]
    asked = [(problem.prompt, chain(problem), {"answer": problem.answer}) for problem in problems]
    walls, processor = [], []
    try:
        for _ in range(num_rounds):
            wall, own = time.perf_counter(), time.process_time()
            rewards = await asyncio.gather(*(pool.score(*call) for call in asked))
            walls.append(time.perf_counter() - wall)
            processor.append(time.process_time() - own)
            assert sum(each if isinstance(each, float) else each.reward for each in rewards) == num_rewards
    finally:
        await pool.close()
    own_us = 1e6 * statistics.median(processor) / num_rewards
    print(f"{num_rewards} rewards a round, {num_rounds} rounds")
    print(f"own processor time: {own_us:.1f} us a reward (median round)")
    print(f"wall clock: {1e3 * statistics.median(walls):.2f} ms a round, slowest {1e3 * max(walls):.2f} ms")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest worker: {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a reward to the process that asks for it.")
    parser.add_argument("--rewards", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rewards, arguments.rounds, arguments.workers))


if __name__ == "__main__":
    main()
