"""What a turn costs beside generation and the world: in the driver's process, and through a worker process.

    python bench/episodes.py [--episodes 200] [--turns 40] [--context 64] [--rounds 5]

Turns are made at once, of 16 tokens each, so all time is overhead. `latency` is the wall clock of a turn of one episode
alone; the others are of many episodes at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import statistics
import time
from typing import Any

import numpy as np

from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions
from stretto.environments.protocol import Environment, Policy
from stretto.environments.worker_process import WorkerOptions
from stretto.run.episodes import Episode
from stretto.run.turns import Turns
from stretto.types import Completion, Prompt

SPEC = EnvironmentSpec("episodes:Counts", 1_000_000)


class Counts:
    """Asks `turns` times, with one token of observation between."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        context = list(prompt.tokens)
        for number in range(prompt.row["turns"]):
            context += [*(await policy.generate(context)).tokens.tolist(), number]
        return 1.0


async def play(environment: Environment, number: int, turns: int, context: int) -> None:
    prompt = Prompt(number, "", tuple(range(context)), {"turns": turns})
    done = Turns(prompt.tokens)
    made = Completion(number, 0, np.arange(16, dtype=np.int32), np.zeros(16, np.float32), "stop", "")

    async def take_turn(_: int, tokens: tuple[int, ...], lineage: int, train: bool) -> Completion:
        done.add(tokens, made, lineage, train)
        return made

    assert await Episode(done, take_turn, max_tokens=1 << 30, deadline_s=600.0).play(environment, prompt) == 1.0


def worker_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


async def measure(episodes: int, turns: int, context: int, rounds: int) -> None:
    pool = EpisodePool(EpisodePoolOptions(SPEC, pickle.dumps(None), workers=1), WorkerOptions(print))
    await pool.start()
    (pid,) = pool.memory
    found: dict[str, list[tuple[float, ...]]] = {"driver": [], "worker": []}
    try:
        for _ in range(rounds):
            for name, environment in (("driver", load_environment(SPEC, None)), ("worker", pool)):
                wall, own, theirs = time.perf_counter(), time.process_time(), worker_s(pid)
                await asyncio.gather(*(play(environment, number, turns, context) for number in range(episodes)))
                num_turns = episodes * turns
                took = (time.perf_counter() - wall, time.process_time() - own, worker_s(pid) - theirs)
                wall = time.perf_counter()
                await play(environment, 0, turns, context)
                alone = (time.perf_counter() - wall) / turns
                found[name].append((*(1e3 * each / num_turns for each in took), 1e3 * alone))
    finally:
        await pool.close()
    print(f"{episodes} episodes of {turns} turns, contexts from {context} tokens; ms a turn, median of {rounds} rounds")
    for name, measured in found.items():
        wall, own, theirs, alone = (statistics.median(each) for each in zip(*measured, strict=True))
        print(f"{name}: wall {wall:.3f}, driver's CPU {own:.3f}, worker's CPU {theirs:.3f}, latency {alone:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a turn beside generation and the world.")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.episodes, arguments.turns, arguments.context, arguments.rounds))


if __name__ == "__main__":
    main()
