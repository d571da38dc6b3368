"""The quickstart under `synchronous` and `multi-version`, and how near the latter comes to what its parts allow.

    python bench/paradigms.py --seeds 0,1,2 --out bench/results/paradigms.json

Each run is `stretto train` in a process of its own, with the same recipe, seed and number of updates, one after
another. `synchronous` is given the best of several thread settings. *Ideal* is the slower of generation and training,
each alone on the machine with its threads of the multi-version run and the data of that run: generation with its target
of `rows` always full and each completion as long as it was, training on the recorded batches.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from stretto.engines.native.engine import NativeEngine
from stretto.models.loading import load_model
from stretto.models.tiny import tiny_model
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.memory import kv_tokens
from stretto.setup.threads import available_cores
from stretto.store.reader import JournalReader
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, Request, Sample, Sampling

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"


def run(
    paradigm: str, seed: int, steps: int, threads: tuple[int, int] | None, folder: Path, staleness: int | None = None
) -> dict[str, Any]:
    """One `stretto train`; its summary. No evaluation in between: it would be part of the wall time."""
    settings = [f"seed={seed}", f"training.steps={steps}", "evaluation.every=0"]
    if staleness is not None:
        settings.append(f"rollout.staleness={staleness}")
    recipe = load_recipe(RECIPE, settings, compare_as=paradigm)
    path = folder.with_suffix(".toml")
    path.write_text(recipe.source_toml())
    command = [sys.executable, "-m", "stretto", "train", str(path), "--out", str(folder)]
    if threads is not None:
        command += ["--set", f"runtime.engine_threads={threads[0]}", "--set", f"runtime.trainer_threads={threads[1]}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def recorded_batches(folder: Path) -> list[list[Sample]]:
    """What a run trained on, an update each."""
    with JournalReader(folder / "journal.sqlite") as reader:
        return [reader.batch(update.update) for update in reader.updates()]


def parts(recipe: Recipe) -> tuple[NativeEngine, LocalTrainer]:
    """Engine and trainer as a run makes them."""
    model = load_model(str(tiny_model()), torch.float32, torch.device("cpu"))
    lora = recipe.model.lora
    assert lora is not None
    engine = NativeEngine(
        model,
        kind="lora",
        slots=recipe.num_slots,
        rows=recipe.plan.rows,
        kv_tokens=kv_tokens(recipe, model.config, 16),
        max_context=4096,
        lora_rank=lora.rank,
        prefill_tokens=recipe.rollout.prefill_chunk_tokens,
    )
    trainer = LocalTrainer(
        model,
        lora=lora,
        options=recipe.training,
        temperature=recipe.rollout.temperature,
        max_tokens=recipe.rollout.max_tokens,
        seed=recipe.seed,
    )
    return engine, trainer


def generation_alone(engine: NativeEngine, trainer: LocalTrainer, batches: Sequence[Sequence[Sample]]) -> float:
    """Tokens a second with the rows always full, until the first row stays empty."""
    engine.load(trainer.weights(trainer.version))
    version = trainer.version
    requests = [
        Request(s.trajectory, version, tuple(s.prompt), s.trajectory, Sampling(len(s.completion.tokens)), group=s.group)
        for batch in batches
        for s in batch
    ]
    ahead = 2 * engine.capacity.rows
    for request in requests[:ahead]:
        engine.add(request)
    following = iter(requests[ahead:])
    before, started = engine.report().tokens, time.perf_counter()
    left = len(requests) - ahead
    while left > 0:
        for _ in engine.step():
            if (another := next(following, None)) is not None:
                engine.add(another)
                left -= 1
            else:
                left = 0
    speed = (engine.report().tokens - before) / (time.perf_counter() - started)
    engine.abort([request.id for request in requests])
    engine.unload(version)
    return speed


def training_alone(trainer: LocalTrainer, batches: Sequence[Sequence[Sample]]) -> float:
    """Completion tokens a second of updates, weights copied out after each as in a run."""
    tokens, started = 0, time.perf_counter()
    for batch in batches:
        trainer.update(Batch(trainer.version, batch))
        trainer.weights(trainer.version)
        tokens += sum(len(sample.completion.tokens) for sample in batch)
    return tokens / (time.perf_counter() - started)


def ideal(recipe: Recipe, folder: Path, repeats: int) -> dict[str, Any]:
    """Generation and training alone, alternating; best of each, since noise only slows."""
    torch.set_num_threads(1)
    batches = recorded_batches(folder)[-24:]
    engine, trainer = parts(recipe)
    generation = [generation_alone(engine, trainer, batches)]
    training = [training_alone(trainer, batches)]
    for _ in range(repeats - 1):
        generation.append(generation_alone(engine, trainer, batches))
        training.append(training_alone(trainer, batches))
    return {"generation_tokens_per_second": generation, "training_tokens_per_second": training}


def measure(seed: int, options: argparse.Namespace, best: tuple[int, int], root: Path) -> dict[str, Any]:
    """Both paradigms and their parts with one seed, and multi-version with the other staleness bounds."""
    synchronous = run("synchronous", seed, options.steps, best, root / f"sync{seed}")
    multi = run("multi-version", seed, options.steps, None, root / f"multi{seed}")
    alone = ideal(load_recipe(RECIPE), root / f"multi{seed}", options.repeats)
    limit = min(max(alone["generation_tokens_per_second"]), max(alone["training_tokens_per_second"]))
    row = {
        "seed": seed,
        "ratio": multi["tokens_per_second"] / synchronous["tokens_per_second"],
        "share_of_ideal": multi["tokens_per_second"] / limit,
        "accuracy_difference": multi["eval_after"] - synchronous["eval_after"],
        "synchronous": synchronous,
        "multi-version": multi,
        **alone,
    }
    print(
        f"seed {seed}: {synchronous['tokens_per_second']:,.0f} -> {multi['tokens_per_second']:,.0f} tok/s, "
        f"{row['ratio']:.2f} x; {row['share_of_ideal']:.0%} of {limit:,.0f} (generation "
        f"{max(alone['generation_tokens_per_second']):,.0f}, training "
        f"{max(alone['training_tokens_per_second']):,.0f}); accuracy "
        f"{synchronous['eval_after']:.3f} -> {multi['eval_after']:.3f}",
        flush=True,
    )
    row["other_staleness"] = {}
    for bound in options.staleness:
        other = run("multi-version", seed, options.steps, None, root / f"multi{seed}k{bound}", bound)
        share = other["tokens_per_second"] / limit
        row["other_staleness"][bound] = {"share_of_ideal": share, **other}
        print(
            f"seed {seed}, K = {bound}: {other['tokens_per_second']:,.0f} tok/s, {share:.0%} of {limit:,.0f}, mean age "
            f"{other['staleness']['mean']:.2f}, accuracy {other['eval_after']:.3f}",
            flush=True,
        )
    return row


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def result_of(rows: Sequence[dict[str, Any]], tuning: dict[str, float], best: tuple[int, int]) -> dict[str, Any]:
    """What is known after the seeds so far."""
    differences = [row["accuracy_difference"] for row in rows]
    error = statistics.stdev(differences) / math.sqrt(len(rows)) if len(rows) > 1 else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(["bench/paradigms.py", *sys.argv[1:]]),
        "hardware": f"{available_cores()} cores, {processor()}, no accelerator used",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "ratio": spread([row["ratio"] for row in rows]),
        "share_of_ideal": spread([row["share_of_ideal"] for row in rows]),
        "accuracy_difference": {"mean": statistics.mean(differences), "standard_error": error},
        "synchronous_threads": {"tried_tokens_per_second": tuning, "best": best},
        "rows": rows,
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3, help="of the measurements alone")
    parser.add_argument("--staleness", type=int, nargs="*", default=[], help="other bounds K to run multi-version with")
    parser.add_argument("--out", type=Path, help="written after every seed")
    options = parser.parse_args()
    cores = available_cores()
    settings = [(1, 1), (1, cores), (cores, cores)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tuning = {
            str(s): run("synchronous", 90, 12, s, root / f"tune{s[0]}{s[1]}")["tokens_per_second"] for s in settings
        }
        best = max(settings, key=lambda s: tuning[str(s)])
        print(f"synchronous by (engine, trainer) threads: { {k: round(v) for k, v in tuning.items()} }; best {best}")
        for seed in (int(seed) for seed in options.seeds.split(",")):
            rows.append(measure(seed, options, best, root))
            result = result_of(rows, tuning, best)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"multi-version over synchronous: {result['ratio']}\nshare of ideal: {result['share_of_ideal']}\n"
        f"accuracy difference: {result['accuracy_difference']}"
    )


if __name__ == "__main__":
    main()
