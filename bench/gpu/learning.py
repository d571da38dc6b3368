"""Learning: SmolLM2-135M-Instruct on arithmetic of reasoning-gym, accuracy an update and a second.

    python -m bench.gpu.learning --write-problems PROBLEMS
    python -m bench.gpu.learning --model models/smollm2-135m --problems PROBLEMS --out RESULTS --resume

Runs of `stretto train`: synchronous, and multi-version with K = 1, 2 and 4, two seeds each. A cell holds every
evaluation, with the updates and the seconds of training before it. Runs come one after another; with `--jobs` several
share the device, which leaves accuracy an update as it is and makes seconds comparable only among runs of one such
sitting. `--problems` are files of the recipe's own problems, for a host without the package that makes them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.cells import Cell, add_options, from_options, integers
from stretto.environments.data import Row
from stretto.environments.reasoning_problems import EXACT_REWARD
from stretto.environments.tasks import load_task
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import Recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.toml"


def cells_of(options: argparse.Namespace) -> list[Cell]:
    kinds = [("synchronous", 0), *(("multi-version", bound) for bound in options.staleness)]
    return [
        Cell("learning", "native", {"paradigm": name, "staleness": k, "seed": seed, "updates": options.updates})
        for seed in options.seeds
        for name, k in kinds
    ]


def overrides(cell: Cell, options: argparse.Namespace) -> list[str]:
    """What differs from the recipe; `--set` of the command line comes last."""
    given = [
        f'model.path="{options.model}"',
        f"seed={cell.parameters['seed']}",
        f"training.steps={options.updates}",
        f"training.learning_rate={options.learning_rate}",
        f"rollout.prompts={options.prompts}",
        f"rollout.group={options.group}",
        f"rollout.max_tokens={options.max_tokens}",
        f"evaluation.every={options.every}",
        f"evaluation.prompts={options.held_out}",
    ]
    if cell.parameters["paradigm"] == "multi-version":
        given.append(f"rollout.staleness={cell.parameters['staleness']}")
    return [*given, *options.set]


def write_problems(recipe: Recipe, folder: Path, held_out: int) -> None:
    """The problems of a recipe's reasoning-gym task as files of prompts and answers."""
    (options,) = recipe.tasks
    task = load_task(options, seed=recipe.seed, num_evaluation=held_out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", task.train), ("held_out", task.evaluation)):
        lines = [json.dumps(_line(row)) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{len(task.train)} problems and {held_out} held out in {folder}")


def _line(row: Row) -> dict[str, Any]:
    return {"messages": list(row.messages or ()), **row.columns}


def recipe_of(cell: Cell, options: argparse.Namespace) -> Recipe:
    recipe = load_recipe(options.recipe, overrides(cell, options), compare_as=str(cell.parameters["paradigm"]))
    if options.problems is None:
        return recipe
    tables = tomllib.loads(recipe.source_toml())
    paths = {"path": options.problems / "train.jsonl", "evaluation_path": options.problems / "held_out.jsonl"}
    tables["task"] = {"type": "file", "reward": EXACT_REWARD, **{key: str(path) for key, path in paths.items()}}
    return parse_recipe(tables)


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    recipe = recipe_of(cell, options)
    with tempfile.TemporaryDirectory() as scratch:
        path, folder = Path(scratch) / "recipe.toml", Path(scratch) / "run"
        path.write_text(recipe.source_toml())
        command = [sys.executable, "-m", "stretto", "train", str(path), "--out", str(folder)]
        subprocess.run(command, check=True)
        summary = json.loads((folder / "summary.json").read_text())
    evaluations = summary["evaluations"]
    return {
        "eval_before": summary["eval_before"],
        "eval_after": summary["eval_after"],
        "eval_best": max((each["score"] for each in evaluations), default=None),
        "wall_s": summary["wall_seconds"],
        "tokens_per_s": summary["tokens_per_second"],
        "staleness_mean": summary["staleness"]["mean"],
        "mismatch_kl": summary["mismatch_kl"],
        "evaluations": evaluations,
        "recipe": recipe.source_toml(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--staleness", type=integers, default=[1, 2, 4])
    parser.add_argument("--seeds", type=integers, default=[0, 1])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="updates between evaluations")
    parser.add_argument("--held-out", type=int, default=256, help="prompts of an evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="runs that share the device")
    parser.add_argument("--problems", type=Path, help="folder that `--write-problems` made")
    parser.add_argument("--write-problems", type=Path, help="write the recipe's problems there, and do nothing else")
    parser.add_argument("--set", action="append", default=[], help="`key=value` for the recipe")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.updates, options.prompts, options.group, options.held_out = 2, 2, 2, 4
        options.max_tokens, options.every, options.staleness, options.seeds = 12, 1, [1], [0]
    if options.write_problems is not None:
        write_problems(load_recipe(options.recipe), options.write_problems, options.held_out)
        return 0
    cells = from_options(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(cells.measure, cell, partial(measure, cell, options)) for cell in cells_of(options)]
    for each in running:
        each.result()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
