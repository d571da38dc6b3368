"""What every objective learns, under `synchronous` and under `multi-version` with several bounds K on staleness.

    python bench/learning.py cells --seeds 0,1,2 --jobs 8 --cores 2 --out bench/results/learning.json
    python bench/learning.py cells --second-task --objectives grpo,cispo,gspo,decoupled-ppo,dora,naive ...

Each cell is one `stretto train` with the quickstart's model and settings, in a process of its own, pinned to its own
cores, and leaves one JSON file in the folder; what is there already is not run again, so a bench that was stopped goes
on by the same command. The table has the final accuracy on held-out problems (mean over seeds and its standard error),
and for each K the paired difference to `synchronous` with the same seeds. A K *holds* if it falls short by no more than
0.03 or two standard errors, unless those are so large that the seeds disagree; one seed says nothing about that.
`naive` has no correction at all, so that one sees what the others are for.

With `--in-flight full` as many groups are under way as K allows, which makes everything about K updates old; by default
only the tail is. The second task is the quickstart's with other numbers: counts are uniform from 5 to 30 instead of
mostly 3, so that a guess at once is rare and what is learned is to keep a long chain right.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import queue
import random
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from stretto.environments.countdown import REWARD, Problem
from stretto.objectives import OBJECTIVES
from stretto.recipe.reading import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
MARGIN = 0.03  # of accuracy
NOISE = 0.05  # a standard error beyond which the seeds disagree
NAMED = ("grpo", "cispo", "gspo", "decoupled-ppo", "dora", "naive")  # run at every K
NAMED_STALENESS = (1, 2, 8)
ANSWERED = ("eval_before", "eval_after", "staleness", "effective_sample_size", "mismatch_kl", "tokens_per_second")

# Every objective with its defaults, but for one that is given as a function; and some with other options.
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in OBJECTIVES if name not in ("custom", "distill")},
    "weighted-topr": {"type": "topr", "negative_weight": 0.5},
    "grpo-half-rate": {"type": "grpo"},
}

# With one optimizer step, the ratio to the policy at the start of the update is 1, and nothing is clipped.
TRAINING: dict[str, dict[str, Any]] = {
    "decoupled-ppo": {"optimizer_steps": 4},
    "grpo-half-rate": {"learning_rate": tomllib.loads(RECIPE.read_text())["training"]["learning_rate"] / 2},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. Its name is the file that keeps it."""

    task: str  # "countdown" or "long-chains"
    objective: str
    staleness: int  # 0: synchronous
    full: bool  # as many groups in flight as the staleness allows
    seed: int
    steps: int

    @property
    def name(self) -> str:
        age = f"k{self.staleness}{'-full' if self.full and self.staleness else ''}"
        return f"{self.task}.{self.objective}.{age}.steps{self.steps}.seed{self.seed}"


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells, seed by seed, so that a bench that is stopped has whole comparisons."""
    task = "long-chains" if options.second_task else "countdown"
    found = []
    for seed in options.seeds:
        for objective in options.objectives:
            bounds = {0, *options.staleness, *(NAMED_STALENESS if objective in options.named else ())}
            full = options.in_flight == "full"
            found += [Cell(task, objective, bound, full, seed, options.steps) for bound in sorted(bounds)]
    return found


def write_recipe(cell: Cell, folder: Path, evaluation_prompts: int) -> Path:
    """The quickstart's recipe for a cell, checked before anything is run."""
    tables: dict[str, Any] = tomllib.loads(RECIPE.read_text())
    tables["seed"] = cell.seed
    tables["algorithm"] = dict(ALGORITHMS[cell.objective])
    tables["training"] |= {"steps": cell.steps, **TRAINING.get(cell.objective, {})}
    tables["evaluation"] = {"prompts": evaluation_prompts}
    if cell.staleness:
        tables["rollout"] |= {"paradigm": "multi-version", "staleness": cell.staleness}
        if cell.full:
            tables["rollout"]["in_flight"] = "full"
    else:
        tables["rollout"] = {**tables["rollout"], "paradigm": "synchronous"}
        del tables["rollout"]["staleness"]
    if cell.task == "long-chains":
        train, held_out = long_chains(folder.parent, evaluation_prompts)
        tables["task"] = {"type": "file", "path": str(train), "evaluation_path": str(held_out), "reward": REWARD}
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(tables))
    load_recipe(path)
    return path


def long_chains(folder: Path, num_held_out: int) -> tuple[Path, Path]:
    """The files of the second task; the same whoever writes them."""
    sides: tuple[list[str], list[str]] = ([], [])
    draw = random.Random("long chains")
    while len(sides[0]) < 4096 or len(sides[1]) < num_held_out:
        problem = Problem(draw.randrange(10), draw.randrange(1, 6), draw.randrange(5, 31))
        sides[problem.held_out].append(json.dumps({"prompt": problem.prompt, "answer": problem.answer}))
    paths = folder / "long_chains.jsonl", folder / "long_chains_held_out.jsonl"
    for path, lines, count in zip(paths, sides, (4096, num_held_out), strict=True):
        unfinished = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        unfinished.write_text("\n".join(lines[:count]) + "\n")
        unfinished.replace(path)  # at once: another cell may be reading it
    return paths


def run_cell(cell: Cell, options: argparse.Namespace, cores: queue.Queue[list[int]]) -> dict[str, Any]:
    """One `stretto train`, on cores of its own; its record, which is in the folder when this returns."""
    work = options.folder / "runs" / cell.name
    work.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    recipe = write_recipe(cell, work, options.evaluation_prompts)
    own = cores.get()
    command = [sys.executable, "-m", "stretto", "train", str(recipe), "--out", str(work)]
    pinned = ["taskset", "-c", ",".join(map(str, own)), *command] if own else command
    log, started = work.with_suffix(".log"), time.perf_counter()
    try:
        with log.open("w") as output:
            done = subprocess.run(pinned, stdout=output, stderr=subprocess.STDOUT, check=False)
    finally:
        cores.put(own)
    if done.returncode:
        raise RuntimeError(f"{cell.name} ended with {done.returncode}; the end of `{log}`:\n{log.read_text()[-2000:]}")
    summary = json.loads((work / "summary.json").read_text())
    record = {
        **asdict(cell),
        "accuracy": summary["eval_after"],
        "summary": {name: summary.get(name) for name in ANSWERED},
        "evaluation_prompts": options.evaluation_prompts,
        "cores": len(own) or None,
        "wall_s": time.perf_counter() - started,
    }
    unfinished = path_of(cell, options.folder).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(path_of(cell, options.folder))
    shutil.rmtree(work)
    return record


def path_of(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json"


def run_all(cells: Sequence[Cell], options: argparse.Namespace) -> list[str]:
    """Run what is missing, `--jobs` at a time; what failed, in words."""
    missing = [cell for cell in cells if not path_of(cell, options.folder).exists()]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} there already", flush=True)
    if not missing:
        return []
    # Made and warm-started once, before several runs want it.
    subprocess.run([sys.executable, "-c", "from stretto.models.tiny import tiny_model; tiny_model()"], check=True)
    cores: queue.Queue[list[int]] = queue.Queue()
    for own in core_sets(options.jobs, options.cores):
        cores.put(own)
    failed: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run_cell, cell, options, cores): cell for cell in missing}
        for number, future in enumerate(as_completed(running), start=1):
            cell, error = running[future], future.exception()
            if error is not None:
                failed.append(str(error))
                print(f"[{number}/{len(missing)}] {error}", flush=True)
                continue
            record = future.result()
            print(
                f"[{number}/{len(missing)}] {cell.name}: {record['summary']['eval_before']:.3f} -> "
                f"{record['accuracy']:.3f} in {record['wall_s']:.0f} s",
                flush=True,
            )
    return failed


def core_sets(jobs: int, cores: int) -> list[list[int]]:
    """The cores of each job, none shared; with `cores` 0 nothing is pinned."""
    if not cores:
        return [[] for _ in range(jobs)]
    have = sorted(os.sched_getaffinity(0))
    if jobs * cores > len(have):
        raise SystemExit(f"`--jobs {jobs}` of `--cores {cores}` need {jobs * cores} cores, and there are {len(have)}")
    return [have[job * cores : (job + 1) * cores] for job in range(jobs)]


# -- the table ---------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float | None]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error}


def compared(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row an objective and K, with the paired difference to `synchronous` over the seeds that both have."""
    by_key: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for record in records:
        by_key.setdefault((record["objective"], record["staleness"]), {})[record["seed"]] = record
    rows = []
    for (objective, staleness), runs in by_key.items():
        ages = [record["summary"]["staleness"]["mean"] for record in runs.values()]
        row: dict[str, Any] = {
            "objective": objective,
            "staleness": staleness,
            "seeds": sorted(runs),
            "mean_age": statistics.mean(ages),
            "accuracy": spread([record["accuracy"] for record in runs.values()]),
        }
        synchronous = by_key.get((objective, 0), {})
        both = sorted(runs.keys() & synchronous.keys())
        if staleness and both:
            row["difference"] = spread([runs[s]["accuracy"] - synchronous[s]["accuracy"] for s in both])
            if len(both) > 1:
                row["verdict"] = verdict(row["difference"])
        rows.append(row)
    return rows


def verdict(difference: dict[str, float | None]) -> str:
    """Whether a K falls short of `synchronous` by no more than noise; to be better is no fault.

    Noise excuses only so much: where the seeds lie far apart, some of them learned and some did not.
    """
    mean, error = difference["mean"], difference["standard_error"]
    assert mean is not None
    assert error is not None
    if -mean <= MARGIN:
        return "holds"
    if error > NOISE:
        return "seeds disagree"
    return "holds" if -mean <= 2 * error else "falls short"


def plus_minus(value: dict[str, float | None], sign: str = "") -> str:
    error = value["standard_error"]
    return f"{value['mean']:{sign}.3f}" + (f" ± {error:.3f}" if error is not None else "")


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table for people."""
    lines = ["| objective | K | mean age | accuracy | difference to synchronous | |", "|---|---|---|---|---|---|"]
    for row in rows:
        difference = plus_minus(row["difference"], "+") if "difference" in row else ""
        age = f"{row['mean_age']:.2f}"
        lines.append(
            f"| {row['objective']} | {row['staleness']} | {age} | {plus_minus(row['accuracy'])} | {difference} | "
            f"{row.get('verdict', '')} |"
        )
    return "\n".join(lines)


def result_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(["bench/learning.py", *sys.argv[1:]]),
        "hardware": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, no accelerator used",
        "rows": compared(records),
        "cells": list(records),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    found = [part for part in text.split(",") if part]
    unknown = [name for name in found if name not in ALGORITHMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"`{unknown[0]}` is no objective; there are {', '.join(ALGORITHMS)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the cells' files")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--objectives", type=names, default=list(ALGORITHMS), help="default: all")
    parser.add_argument("--staleness", type=numbers, default=[4], help="bounds K for every objective")
    parser.add_argument(
        "--named", type=names, default=list(NAMED), help=f"objectives that are run at K = {NAMED_STALENESS} too"
    )
    parser.add_argument("--in-flight", choices=("default", "full"), default="default")
    parser.add_argument("--second-task", action="store_true", help="long chains instead of the quickstart's")
    parser.add_argument("--evaluation-prompts", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--cores", type=int, default=2, help="of each run, by taskset; 0: not pinned")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--out", type=Path, help="the table and all cells, as JSON")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    cells = cells_of(options)
    failed = [] if options.table else run_all(cells, options)
    paths = [path_of(cell, options.folder) for cell in cells]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    records.sort(key=lambda record: (options.objectives.index(record["objective"]), record["staleness"]))
    result = result_of(records)
    print(table_of(result["rows"]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if failed:
        raise SystemExit(f"{len(failed)} cells failed; the same command runs them again")


if __name__ == "__main__":
    main()
