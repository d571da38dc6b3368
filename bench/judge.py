"""A judge that takes 200 ms: calls in flight, and what a run loses to it. `python -m bench.judge`.

The judge is a server on loopback, in a process of its own, that answers every call after `--latency` seconds.

- *In flight.* `--calls` different completions are scored at once by the pool of a run. The figure is the mean number of
  calls that the server has open from the arrival of the first to that of the last, of 64 that may be, and the calls a
  second over all, of 64 / latency.
- *A run.* The quickstart's task is trained for `--updates` updates with three scorers that give the same rewards: a
  function that returns at once (`instant`), an `async def` that sleeps as long as the judge takes (`ideal`: a scorer
  without any cost but its latency), and the judge. They are run in turn, `--repeats` times. The figures are the idle
  share of the trainer, its idle seconds beyond those of `instant`, and the time of the run.

- *A paced run.* The same three scorers over the real loop, core and journal, with an engine and a trainer that sleep
  instead of computing: nothing but the scorer's latency and its own cost can make the trainer idle. `staleness` covers
  the tail of the completions and the latency; a second run with a bound of 1 shows the wait when it does not.

`--quick` runs all of it in a few seconds; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import transformers
from aiohttp import web

from bench.paced import PacedEngine, decode, run_paced
from stretto.assembly.train import train
from stretto.core.plan import resolve_plan
from stretto.engines.threaded import ThreadedEngine
from stretto.environments.countdown import problem_at
from stretto.environments.data import Row
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_pool import RewardPool
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.single_turn import SingleTurn
from stretto.observe.progress import Silent
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.run.task_play import TaskPlay
from stretto.setup.scorers import judge_scorer
from stretto.training.fake import FakeTrainer
from stretto.types import Sampling

CONCURRENCY = 64
QUESTION = "right={answer} said={completion}"
FUNCTIONS = """
import asyncio


def instant(prompt, completion, *, answer, **row):
    return float(completion.endswith(f"={answer}"))


async def ideal(prompt, completion, *, answer, **row):
    await asyncio.sleep(LATENCY)
    return instant(prompt, completion, answer=answer)
"""


def serve(latency_s: float, ready: Any) -> None:
    """Serves chat completions until the process is ended. `GET /stats` tells the calls and the time they were open."""
    state = {
        "open": 0,
        "most": 0,
        "calls": 0,
        "open_s": 0.0,
        "since": 0.0,
        "first": 0.0,
        "last": 0.0,
        "open_by_last": 0.0,
    }

    def count(change: int) -> None:
        now = time.monotonic()
        state["open_s"] += state["open"] * (now - state["since"])
        state["since"] = now
        state["open"] += change
        if change > 0:
            state["first"] = state["first"] or now
            state["last"], state["open_by_last"] = now, state["open_s"]
        state["most"] = max(state["most"], state["open"])

    async def chat(request: web.Request) -> web.Response:
        count(1)
        body = await request.json()
        await asyncio.sleep(latency_s)
        right, _, said = body["messages"][0]["content"].partition(" said=")
        score = 10 * said.endswith(f"={right.removeprefix('right=')}")
        state["calls"] += 1
        count(-1)
        usage = {"prompt_tokens": 20, "completion_tokens": 1}
        return web.json_response({"choices": [{"message": {"content": str(score)}}], "usage": usage})

    async def stats(request: web.Request) -> web.Response:
        found = dict(state)
        state.update(calls=0, open_s=0.0, most=0, first=0.0, last=0.0, open_by_last=0.0)
        return web.json_response(found)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/v1/models", lambda request: _models())
        app.router.add_get("/stats", stats)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.send(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(main())


async def _models() -> web.Response:
    return web.json_response({"data": [{"id": "judge"}]})


def stats_of(port: int) -> dict[str, float]:
    """Returns what the server counted since the last call."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats") as reply:
        found: dict[str, float] = json.load(reply)
    return found


def judge_options(port: int, **changes: Any) -> dict[str, Any]:
    return {
        "address": f"http://127.0.0.1:{port}/v1",
        "model": "judge",
        "prompt": QUESTION,
        "scale": [0, 10],
        "concurrency": CONCURRENCY,
        **changes,
    }


def in_flight(port: int, num_calls: int, latency_s: float) -> dict[str, float]:
    """Scores different completions at once, and returns how many calls the server had open."""

    async def run() -> float:
        built = judge_scorer(JudgeOptions.model_validate(judge_options(port)), "task.judge", None)
        pool = RewardPool([RewardSpec("", built.spec, built=built)], columns={"answer": None})
        await pool.start()
        try:
            await pool.score("p", "first", {"answer": 0})  # the connections are made
            stats_of(port)
            began = time.perf_counter()
            calls = (pool.score("p", f"{number}=1", {"answer": 1}) for number in range(num_calls))
            rewards = await asyncio.gather(*calls)
            assert sum(each if isinstance(each, float) else each.reward for each in rewards) == num_calls
            return time.perf_counter() - began
        finally:
            await pool.close()

    wall_s = asyncio.run(run())
    found = stats_of(port)
    return {
        "calls": num_calls,
        "seconds": wall_s,
        "calls_per_second": num_calls / wall_s,
        "share_of_ideal": num_calls / wall_s / (CONCURRENCY / latency_s),
        "mean_in_flight": found["open_by_last"] / max(1e-9, found["last"] - found["first"]),
        "most_in_flight": found["most"],
    }


def recipe(scorer: str, port: int, updates: int, staleness: int, model: str) -> Recipe:
    judged = {"judge": judge_options(port)} if scorer == "judge" else {"reward": f"bench_rewards:{scorer}"}
    return parse_recipe(
        {
            "model": {"path": model, "lora": {"rank": 8}},
            "task": {"type": "file", "path": "prompts.jsonl", **judged},
            "rollout": {
                "staleness": staleness,
                "in_flight": "full",
                "prompts": 16,
                "group": 8,
                "max_tokens": 192,
            },
            "training": {"steps": updates, "learning_rate": 2e-3},
            "evaluation": {"prompts": 0},
            "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "final_checkpoint": False},
        }
    )


def measure(made: Recipe, folder: Path) -> dict[str, float]:
    """Runs a recipe, and returns the idle share of its trainer after the first updates."""
    began = time.perf_counter()
    summary = train(made, folder)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "trainer_idle_seconds" in line]
    skipped = made.plan.staleness + 1  # the pipeline fills
    idle = [line["trainer_idle_seconds"] for line in updates[skipped:]]
    return {
        "seconds": seconds,
        "trainer_idle_share": summary["trainer_idle_share"],
        "idle_seconds_per_update": statistics.mean(idle) if idle else 0.0,
        "first_idle_seconds": updates[0]["trainer_idle_seconds"],
        "rollout_idle_share": summary["rollout_idle_share"],
        "wall_seconds": summary["wall_seconds"],
    }


def runs(port: int, latency_s: float, updates: int, staleness: int, repeats: int, model: str) -> dict[str, Any]:
    """Runs the three scorers in turn."""
    found: dict[str, list[dict[str, float]]] = {"instant": [], "ideal": [], "judge": []}
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        problems = (problem_at(index, 0, held_out=False) for index in range(2_048))
        rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
        Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("bench_rewards.py").write_text(FUNCTIONS.replace("LATENCY", str(latency_s)))
        for repeat in range(repeats):
            for scorer, results in found.items():
                made = recipe(scorer, port, updates, staleness, model)
                results.append(measure(made, Path(scratch) / f"{scorer}-{repeat}"))
                print(f"{scorer:8} idle share {results[-1]['trainer_idle_share']:.3f}, ", end="")
                print(f"{results[-1]['wall_seconds']:.1f} s, {results[-1]['idle_seconds_per_update']:.3f} s an update")
    medians = {
        scorer: {key: statistics.median(each[key] for each in results) for key in results[0]}
        for scorer, results in found.items()
    }
    return {"staleness": staleness, "updates": updates, "medians": medians, "runs": found}


PACED = {"batch": 8, "group_size": 8, "tokens": 30, "sigma": 0.5, "step_s": 0.02, "update_s": 1.5, "rows": 128}


def scorer_pool(scorer: str, port: int, folder: Path) -> RewardPool:
    columns = {"answer": None}
    if scorer != "judge":
        return RewardPool(f"bench_rewards:{scorer}", columns=columns)
    built = judge_scorer(JudgeOptions.model_validate(judge_options(port)), "task.judge", folder)
    return RewardPool([RewardSpec("", built.spec, built=built)], columns=columns)


async def paced(scorer: str, port: int, folder: Path, updates: int, staleness: int) -> dict[str, float]:
    """Runs a scorer with an engine and a trainer that sleep. Returns the idle share of the trainer."""
    plan = resolve_plan(
        "multi-version", batch=int(PACED["batch"]), group_size=int(PACED["group_size"]), updates=updates, retries=2,
        staleness=staleness, rows=int(PACED["rows"]), in_flight=(staleness + 1) * int(PACED["batch"]),
    )  # fmt: skip
    folder.mkdir()
    rows = [Row(text=f"{number}+{number}=", columns={"answer": number}) for number in range(512)]
    pool = scorer_pool(scorer, port, folder)

    def make_engine() -> PacedEngine:
        return PacedEngine(
            rows=int(PACED["rows"]), slots=plan.slots, median_tokens=PACED["tokens"], sigma=PACED["sigma"],
            step_s=PACED["step_s"],
        )  # fmt: skip

    try:
        await pool.start()
        engine = ThreadedEngine(make_engine, name="paced")
        play = TaskPlay(SingleTurn(pool, decode), Sampling(max_tokens=400))
        trainer = FakeTrainer(update_s=PACED["update_s"])
        await run_paced(
            plan, play, rows, folder, engine=engine, trainer=trainer, observer=Silent(), reward_s=pool.longest_s
        )
    finally:
        await pool.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    idle = [line["trainer_idle_seconds"] for line in lines if "trainer_idle_seconds" in line]
    later = idle[staleness + 1 :]  # the pipeline is full
    per_update = statistics.mean(later)
    return {
        "idle_seconds_per_update": per_update,
        "trainer_idle_share": per_update / (per_update + PACED["update_s"]),
        "first_idle_seconds": idle[0],
    }


def paced_runs(port: int, latency_s: float, updates: int, repeats: int) -> dict[str, Any]:
    """Runs the three scorers in turn, under a bound that covers tail and latency, and under one that does not."""
    found: dict[str, Any] = {"setting": PACED, "updates": updates}
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        Path("bench_rewards.py").write_text(FUNCTIONS.replace("LATENCY", str(latency_s)))
        for staleness in (4, 1):
            runs_of: dict[str, list[dict[str, float]]] = {"instant": [], "ideal": [], "judge": []}
            for repeat in range(repeats):
                for scorer, results in runs_of.items():
                    folder = Path(scratch) / f"{staleness}-{scorer}-{repeat}"
                    results.append(asyncio.run(paced(scorer, port, folder, updates, staleness)))
            shares = {
                scorer: statistics.median(each["trainer_idle_share"] for each in results)
                for scorer, results in runs_of.items()
            }
            print(f"paced, K = {staleness}: idle share of the trainer: ", end="")
            print(", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
            found[f"staleness {staleness}"] = {"median_idle_share": shares, "runs": runs_of}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency", type=float, default=0.2)
    parser.add_argument("--calls", type=int, default=3_200)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.latency, options.calls, options.updates, options.repeats = 0.05, 128, 6, 1
    torch.set_num_threads(1)
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.latency, there), daemon=True)
    server.start()
    try:
        port = here.recv()
        flight = in_flight(port, options.calls, options.latency)
        print(f"{flight['mean_in_flight']:.1f} calls in flight on average, of {CONCURRENCY}; ", end="")
        print(f"{flight['calls_per_second']:.0f} calls/s, {flight['share_of_ideal']:.2f} of {CONCURRENCY} / latency")
        slept = paced_runs(port, options.latency, options.updates, options.repeats)
        trained = runs(port, options.latency, options.updates, options.staleness, options.repeats, options.model)
    finally:
        server.terminate()
        server.join(10)
    idle = {scorer: values["trainer_idle_share"] for scorer, values in trained["medians"].items()}
    print("idle share of the trainer: " + ", ".join(f"{name} {share:.3f}" for name, share in idle.items()))
    if options.out is not None:
        options.out.write_text(
            json.dumps(
                {
                    "date": datetime.date.today().isoformat(),
                    "command": "python -m bench.judge "
                    + " ".join(
                        f"--{name} {getattr(options, name)}"
                        for name in ("latency", "calls", "updates", "staleness", "repeats")
                    ),
                    "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} after it",
                    "versions": {
                        "python": platform.python_version(),
                        "torch": torch.__version__,
                        "transformers": transformers.__version__,
                    },
                    "latency_seconds": options.latency,
                    "in_flight": flight,
                    "paced": slept,
                    "runs": trained,
                },
                indent=1,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
