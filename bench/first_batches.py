"""The first batches of a run on one GPU, simulated: are they sorted by length, and when does the first update begin?

    python -m bench.first_batches --json bench/results/first_batches.json

If all groups in flight start at once, the first batch is made of those that are done first: the shortest answers. So a
run has one batch of rows until its first batch is taken (`Plan.ramps`). This compares both on the real core and the
simulated device of `bench.gpu.simulate`. Needs no GPU.

Stated: GSM8K with a model of 0.5B on an H200. 64 groups of 8 and prompts of 110 tokens. A group has a median length,
log-normal with median 270 and sigma 0.3; its answers are log-normal around it with sigma 0.25, at most 512 tokens, or
one in 190 of 4,096 in the long tail (32 groups of 8). A decode step takes 1.29 ms + 2.9 us a row
(`bench/results/gpu/step_profile/few_rows`), a token of training 4.3 us alone; side by side each keeps 0.61 of its
speed (0.57 s and 0.93 s an update in `bench/results/gpu/gsm8k/0.5b`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.cells import write_results
from bench.gpu.costs import StepCost
from bench.gpu.simulate import Costs, Run
from bench.gpu.tables import decimal, rate, table
from stretto.core.plan import Plan, resolve_plan

COSTS = Costs(StepCost(1.29e-3, 2.9e-6, 0.0), 4.3e-6, 0.61, 0.61)
PROMPT, GROUP, SHOWN = 110, 8, 4
TASKS = {"GSM8K": (64, 512, 0.0), "long tail": (32, 4_096, 1 / 190)}  # groups, longest answer, share of those


def draw_lengths(groups: int, longest: int, share: float, seed: int) -> list[int]:
    """Returns the lengths of all trajectories, group by group."""
    random = np.random.default_rng(seed)
    medians = random.lognormal(np.log(270), 0.3, (groups, 1))
    lengths = medians * random.lognormal(0.0, 0.25, (groups, GROUP))
    lengths = np.where(random.random(lengths.shape) < share, longest, lengths)
    return [int(each) for each in np.clip(lengths, 32, longest).reshape(-1)]


def simulate(plan: Plan, lengths: list[int]) -> dict[str, Any]:
    """Returns when the first update begins, the mean lengths of the first batches and the seconds of the whole run."""
    run = Run(plan, lengths, PROMPT, COSTS)
    results = run.run()
    return {
        "first_update_begins_s": run.batches[0][0],
        "lengths": [float(np.mean(lengths)) for _, lengths in run.batches[:SHOWN]],
        "wall_s": results["wall_s"],
        "staleness_mean": results["staleness_mean"],
    }


def compare(task: str, staleness: int, updates: int, seeds: int) -> list[dict[str, Any]]:
    """Returns means over seeds, with the whole `rows` at once and with one batch of them first."""
    groups, longest, share = TASKS[task]
    plan = resolve_plan(
        "multi-version", batch=groups, group_size=GROUP, updates=updates, staleness=staleness, retries=0, ahead=True
    )
    found = []
    for ramps in (False, True):
        draws = [draw_lengths(updates * groups, longest, share, seed) for seed in range(seeds)]
        runs = [simulate(replace(plan, ramps=ramps), draw) for draw in draws]
        means = {name: np.mean([run[name] for run in runs], axis=0).tolist() for name in runs[0]}
        mean_length = float(np.mean([np.mean(draw) for draw in draws]))
        found.append(
            {"task": task, "staleness": staleness, "rows": plan.rows, "ramps": ramps, "length": mean_length, **means}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--staleness", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    found = [
        each
        for task in TASKS
        for staleness in options.staleness
        for each in compare(task, staleness, options.updates, options.seeds)
    ]
    head = ["task", "K", "rows at the start", "first update begins, s"]
    head += [f"length, batch {number}" for number in range(1, SHOWN + 1)] + ["length, all", "seconds, all updates"]
    rows = [
        [
            each["task"],
            str(each["staleness"]),
            "one batch" if each["ramps"] else "all",
            decimal(each["first_update_begins_s"]),
            *(rate(length) for length in each["lengths"]),
            rate(each["length"]),
            decimal(each["wall_s"]),
        ]
        for each in found
    ]
    print(table("The first batches", head, rows))
    write_results(options.json, found)


if __name__ == "__main__":
    main()
