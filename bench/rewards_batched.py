"""Throughput of batched rewards against rewards of one completion at a time, through the pool of processes.

    python bench/rewards_batched.py [--rewards 2048] [--rounds 9] [--out bench/results/rewards_batched.json]

Each function exists in both forms and returns the same rewards. All completions of a round are asked for at once, as at
the end of a rollout step, and one worker process scores them. So a figure is of everything: the event loop of the
caller, both pipes, the call, and the result. Rounds of the two forms alternate.

| function | one call costs | what a batch saves |
|---|---|---|
| equal | nothing: compares two strings | nothing but calls |
| classifier | 400 decision trees, one after the other, each a few calls of numpy | the overhead of these calls |
| request | 2 ms of waiting, as a request to a service on the same machine takes | all requests but one |

The bar is 20 x for a function whose call costs more than what it computes (`classifier`, `request`). For `equal` the
pipes are all of the cost, and nothing can be saved there.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

from stretto.environments.grades import Grade
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_pool import RewardPool

REQUEST_S = 0.002
SIZE = 64
TREES, DEPTH = 400, 3


class Trees:
    """A boosted ensemble of decision trees with random splits, evaluated for all rows of a table at once."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0)
        self._features = drawn.integers(0, SIZE, (TREES, 2**DEPTH))
        self._splits = drawn.integers(0, 4, (TREES, 2**DEPTH)).astype(np.float32)
        self._leaves = drawn.standard_normal((TREES, 2**DEPTH)).astype(np.float32)

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        rows = np.arange(len(vectors))
        scores = np.zeros(len(vectors), dtype=np.float32)
        for features, splits, leaves in zip(self._features, self._splits, self._leaves, strict=True):
            nodes = np.ones(len(vectors), dtype=np.int64)
            for _ in range(DEPTH):
                nodes = 2 * nodes + (vectors[rows, features[nodes]] > splits[nodes])
            scores += leaves[nodes - 2**DEPTH]
        return scores


@cache
def _trees() -> Trees:
    return Trees()


def _vectors(texts: list[str]) -> np.ndarray:
    """Returns a row for each text: how often each of `SIZE` classes of bytes occurs in it."""
    encoded = [text.encode() for text in texts]
    codes = np.frombuffer(b"".join(encoded), np.uint8) % SIZE
    owners = np.repeat(np.arange(len(texts)), [len(each) for each in encoded])
    counts = np.bincount(owners * SIZE + codes, minlength=len(texts) * SIZE)
    return counts.reshape(len(texts), SIZE).astype(np.float32)


def equal(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def equal_batched(completions: list[str], answer: list[str]) -> list[float]:
    return [float(each == right) for each, right in zip(completions, answer, strict=True)]


def classifier(prompt: str, completion: str) -> float:
    return float(_trees().predict(_vectors([completion]))[0])


def classifier_batched(completions: list[str]) -> list[float]:
    return [float(each) for each in _trees().predict(_vectors(completions))]


def request(prompt: str, completion: str) -> float:
    time.sleep(REQUEST_S)
    return float(len(completion))


def request_batched(completions: list[str]) -> list[float]:
    time.sleep(REQUEST_S)
    return [float(len(each)) for each in completions]


NAMES = ("equal", "classifier", "request")


async def _round(pool: RewardPool, texts: list[str], rows: list[dict[str, str]]) -> tuple[float, list[float]]:
    began = time.perf_counter()
    found = await asyncio.gather(*(pool.score("2+2", *each) for each in zip(texts, rows, strict=True)))
    took = time.perf_counter() - began
    return took, [each.reward if isinstance(each, Grade) else each for each in found]


async def measure(name: str, num_rewards: int, rounds: int) -> dict[str, float]:
    """Returns the rewards a second of both forms of a function, of the median round, and their ratio."""
    texts = [f"the answer to question {number} is {number % 97}" for number in range(num_rewards)]
    rows = [{"answer": text if place % 2 else "no"} for place, text in enumerate(texts)]
    pools = {form: RewardPool((RewardSpec(name, f"rewards_batched:{form}"),)) for form in (name, f"{name}_batched")}
    seconds: dict[str, list[float]] = {form: [] for form in pools}
    rewards: dict[str, list[float]] = {}
    try:
        for pool in pools.values():
            await pool.start()
        for number in range(rounds + 1):
            for form, pool in pools.items():
                took, rewards[form] = await _round(pool, texts, rows)
                if number:  # the first round fills caches
                    seconds[form].append(took)
    finally:
        for pool in pools.values():
            await pool.close()
    single, batched = (rewards[form] for form in pools)
    assert np.allclose(single, batched, atol=1e-4), f"the two forms of {name} disagree"
    rates = [num_rewards / statistics.median(seconds[form]) for form in pools]
    return {"single_per_s": round(rates[0]), "batched_per_s": round(rates[1]), "ratio": round(rates[1] / rates[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Batched rewards against single ones, through the pool.")
    parser.add_argument("--rewards", type=int, default=2_048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench/results/rewards_batched.json"))
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    found = {}
    for name in NAMES:
        found[name] = asyncio.run(measure(name, arguments.rewards, arguments.rounds))
        print(
            f"{name:<12} {found[name]['single_per_s']:>8,} single/s  {found[name]['batched_per_s']:>8,} batched/s  "
            f"{found[name]['ratio']:.1f} x"
        )
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python bench/rewards_batched.py --rewards {arguments.rewards} --rounds {arguments.rounds}",
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "load": round(os.getloadavg()[0], 1),  # more than the cores: other programs ran beside it
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "bar": "20 x for classifier and request",
        "results": found,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    if min(found[name]["ratio"] for name in ("classifier", "request")) < 20:
        sys.exit("the bar of 20 x is missed")


if __name__ == "__main__":
    main()
