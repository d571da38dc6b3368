"""GSM8K, our side: a real model learns school mathematics; accuracy per update and per second.

    python examples/gsm8k.py
    python -m bench.gpu.gsm8k --model MODEL --problems data/gsm8k --out RESULTS --resume
    python -m bench.gpu.gsm8k --model MODEL --engine vllm --out RESULTS

Runs `stretto train` on `recipes/gsm8k.toml`, once per paradigm and seed. Two cells per run:

- `gsm8k`: every update, every evaluation (temperature 1, the first `--held-out` test problems), rates and idle shares.
- `gsm8k-test`: the whole test set, sampled and greedy, before and after training, by the native engine.

`startup_s` is from the start of the process to the first admission, without the evaluation that lies between them. Both
clocks of the curve begin after it: `elapsed_s` at the first admission, `after_first_s` at the end of the first update,
which compiles and captures. A point stands at the end of the update that made its version. Evaluations run beside
training and slow it down, so that these clocks include them; `tokens_per_s_undisturbed` is over the updates during
which none ran. `bench.gpu.trl_gsm8k` measures TRL, whose clock stands still during evaluations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from bench.gpu.answers import answer_all, prompts_of, stop_tokens
from bench.gpu.cells import Cell, add_options, from_options, integers, words
from bench.gpu.problems import load_reward, read_problems, score, write_tiny_model, write_tiny_problems
from stretto.engines.native.engine import NativeEngine
from stretto.models.checksums import checksum
from stretto.models.loading import load_model, load_tokenizer
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.types import Request, Sampling, Weights

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k.toml"
REWARD = "stretto.environments.rewards.mathematics:reward"
COMMAND = (sys.executable, "-c", "import sys; from stretto.cli import main; sys.exit(main(sys.argv[1:]))")
TEST_ROWS = 1_024  # that decode at once in the whole test
MARGIN = 32  # tokens of context beyond the longest prompt and completion
KEPT = (
    "update", "tokens", "cycle_seconds", "update_seconds", "trainer_idle_seconds", "staleness_mean", "staleness_max",
    "length_mean", "length_max", "truncated", "reward_mean", "groups_without_signal", "entropy", "mismatch_kl",
    "effective_sample_size", "grad_norm", "mfu",
)  # fmt: skip


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The training cells, seed by seed."""
    kinds = [
        (paradigm, bound)
        for paradigm in options.paradigms
        for bound in ([0] if paradigm == "synchronous" else options.staleness)
    ]
    shared = {"model": Path(options.model).name, "updates": options.updates, "reward": options.reward.split(":")[-1]}
    shared |= {} if options.engine == "native" else {"engine": options.engine}
    asynchronous = {"in_flight": options.in_flight, "rows": options.rows}
    given = {name: value for name, value in asynchronous.items() if value is not None}
    return [
        Cell(
            "gsm8k",
            "native",
            {**shared, "paradigm": paradigm, "staleness": bound, "seed": seed, **(given if bound else {})},
        )
        for seed in options.seeds
        for paradigm, bound in kinds
    ]


def recipe_of(cell: Cell, options: argparse.Namespace) -> Recipe:
    """The recipe with what the command line says; its `--set` comes last."""
    given = [
        f'model.path="{options.model}"',
        f'task.path="{options.problems / "train.jsonl"}"',
        f'task.evaluation_path="{options.problems / "test.jsonl"}"',
        f'task.reward="{options.reward}"',
        f"seed={cell.parameters['seed']}",
        f"training.steps={options.updates}",
        f"evaluation.every={options.every if options.every < options.updates else 0}",
        f"evaluation.prompts={options.held_out}",
        f'engine.type="{options.engine}"',
        "evaluation.greedy=false",  # the whole test has the greedy score, and TRL's evaluations are sampled alone
    ]
    if cell.parameters["paradigm"] != "synchronous":
        given.append(f"rollout.staleness={cell.parameters['staleness']}")
        if options.in_flight is not None:
            given.append(f"rollout.in_flight={json.dumps(options.in_flight)}")
        if options.rows is not None:
            given.append(f"rollout.rows={options.rows}")
    return load_recipe(options.recipe, [*given, *options.set], compare_as=str(cell.parameters["paradigm"]))


# -- training ----------------------------------------------------------------------------------------------------------


def train(recipe: Path, folder: Path, arguments: Sequence[str] = ()) -> float:
    """Runs `stretto train` in a process of its own; returns when that was started, by the clock of the metrics."""
    started = time.time()
    subprocess.run([*COMMAND, "train", str(recipe), *arguments, "--out", str(folder)], check=True)
    return started


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what happened, from the lines of `metrics.jsonl`."""

    updates: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Timeline:
        kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("update", "evaluation")}
        return cls(kinds["update"], kinds["evaluation"])

    @property
    def opened(self) -> float:
        """When the first group was admitted."""
        return float(self.updates[0]["at"] - self.updates[0]["cycle_seconds"])

    @property
    def first_s(self) -> float:
        return float(self.updates[0]["cycle_seconds"])

    def ready_s(self, version: int) -> float:
        """Seconds from the first admission to the end of the update that made a version; 0 for the first version."""
        return 0.0 if version == 0 else float(self.updates[version - 1]["at"] - self.opened)

    def curve(self) -> list[dict[str, Any]]:
        """The evaluations, each at the time when its version was ready."""
        kept = ("version", "moment", "score", "num_scored", "num_failed", "mean_tokens", "seconds")
        points = []
        for line in self.evaluations:
            ready = self.ready_s(line["version"])
            clocks = {"elapsed_s": ready, "after_first_s": max(0.0, ready - self.first_s)}
            points.append({**{name: line[name] for name in kept}, **clocks})
        return points

    def undisturbed(self) -> list[Mapping[str, Any]]:
        """The updates, but the first, during whose cycle no evaluation ran."""
        spans = [(line["at"] - line["seconds"], line["at"]) for line in self.evaluations]
        return [
            line
            for line in self.updates[1:]
            if all(line["at"] <= start or line["at"] - line["cycle_seconds"] >= end for start, end in spans)
        ]

    def rate(self, updates: Sequence[Mapping[str, Any]]) -> float | None:
        """Trained tokens a second over the cycles of some updates."""
        seconds = sum(line["cycle_seconds"] for line in updates)
        return sum(line["tokens"] for line in updates) / seconds if seconds else None


def results_of(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], started: float) -> dict[str, Any]:
    """What a cell says of a run whose process was started at `started`."""
    timeline = Timeline.of(lines)
    before = sum(line["seconds"] for line in timeline.evaluations if line["moment"] == "before")
    later, undisturbed, curve = timeline.updates[1:], timeline.undisturbed(), timeline.curve()
    return {
        "startup_s": timeline.opened - started - before,
        "first_update_s": timeline.first_s,
        "wall_s": summary["wall_seconds"],
        "updates": len(timeline.updates),
        "seconds_per_update": sum(line["cycle_seconds"] for line in later) / len(later) if later else None,
        "tokens_per_s": summary["tokens_per_second"],
        "tokens_per_s_after_first": timeline.rate(later),
        "tokens_per_s_undisturbed": timeline.rate(undisturbed),
        "updates_undisturbed": len(undisturbed),
        "eval_before": summary["eval_before"],
        "eval_after": summary["eval_after"],
        "eval_best": max((point["score"] for point in curve if point["score"] is not None), default=None),
        "trainer_idle_share": summary["trainer_idle_share"],
        "rollout_idle_share": summary["rollout_idle_share"],
        "row_idle_share": summary["row_idle_share"],
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "length_mean": summary["trained_length"],
        "truncated_trajectories": summary["truncated_trajectories"],
        "failed_trajectories": summary["failed_trajectories"],
        "mismatch_kl": summary["mismatch_kl"],
        "evaluations": curve,
        "by_update": [
            {**{name: line[name] for name in KEPT if name in line}, "elapsed_s": line["at"] - timeline.opened}
            for line in timeline.updates
        ],
    }


def measure(cell: Cell, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains in `folder` and returns what the cell says."""
    recipe = recipe_of(cell, options)
    path = folder.parent / f"{folder.name}.toml"
    path.write_text(recipe.source_toml(), encoding="utf-8")
    started = train(path, folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    given = {"in_flight": summary["in_flight"], "rows": summary["rows"], "recipe": recipe.source_toml()}
    return {**results_of(read_lines(folder), summary, started), **given}


# -- the whole test ----------------------------------------------------------------------------------------------------


def adapters(policy: Path, device: str, dtype: torch.dtype) -> list[Weights]:
    """Version 0, an adapter that changes nothing, and version 1, that of a PEFT folder."""
    config = json.loads((policy / "adapter_config.json").read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / config["r"]
    read = load_file(policy / "adapter_model.safetensors", device=device)
    trained = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): tensor.to(dtype)
        for name, tensor in read.items()
    }
    nothing = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    versions = enumerate((nothing, trained))
    return [Weights(version, "lora", tensors, checksum(tensors, scale), scale) for version, tensors in versions]


def whole_test(options: argparse.Namespace, policy: Path, max_tokens: int) -> dict[str, Any]:
    """Accuracy on the whole test set of the model before and after training, sampled at temperature 1 and greedy."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    problems = read_problems(options.problems, "test", options.test_problems)
    tokenizer = load_tokenizer(options.model)
    prompts = prompts_of(tokenizer, problems)
    context = max(len(prompt) for prompt in prompts) + max_tokens + MARGIN
    rows = min(TEST_ROWS, 4 * len(problems))
    model = load_model(options.model, dtype, torch.device(options.device))
    weights = adapters(policy, options.device, dtype)
    engine = NativeEngine(
        model,
        kind="lora",
        slots=2,
        rows=rows,
        kv_tokens=rows * context,
        max_context=context,
        lora_rank=next(t.shape[0] for name, t in weights[1].tensors.items() if name.endswith("lora_A")),
        prefill_tokens=8_192,
    )
    stops = stop_tokens(tokenizer, model)
    asked = {
        (moment, way): Sampling(max_tokens, temperature=temperature, stop_tokens=stops)
        for moment in ("before", "after")
        for way, temperature in (("sampled", 1.0), ("greedy", 0.0))
    }
    for version in weights:
        engine.load(version)
    requests = [
        Request(place * len(prompts) + number, int(moment == "after"), prompt, place * len(prompts) + number, sampling)
        for place, ((moment, _), sampling) in enumerate(asked.items())
        for number, prompt in enumerate(prompts)
    ]
    done, seconds = answer_all(engine, requests)
    engine.close()
    reward, found = load_reward(options.reward), dict[str, dict[str, Any]]()
    for place, (moment, way) in enumerate(asked):
        own = [done[place * len(prompts) + number].tokens.tolist() for number in range(len(prompts))]
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in own]
        scored = score(reward, problems, texts, [len(tokens) for tokens in own], max_tokens)
        found.setdefault(moment, {})[way] = scored.as_json()
    tokens = sum(len(each.tokens) for each in done.values())
    flat = {f"{moment}_{way}": found[moment][way]["accuracy"] for moment, way in asked}
    return {**flat, "seconds": seconds, "tokens_per_s": tokens / seconds, **found}


# -- the command line --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_of(cell: Cell, options: argparse.Namespace) -> Iterator[Path]:
    """Where a run is left: under `--runs`, or nowhere."""
    if options.runs is not None:
        options.runs.mkdir(parents=True, exist_ok=True)
        yield options.runs / cell.name
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch) / "run"


def groups(text: str) -> int | Literal["full"]:
    """A value of `rollout.in_flight`."""
    return "full" if text == "full" else int(text)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct", help="a folder, or a hub name")
    parser.add_argument("--problems", type=Path, default=Path("data/gsm8k"), help="what `examples/gsm8k.py` made")
    parser.add_argument("--reward", default=REWARD)
    parser.add_argument("--engine", choices=["native", "vllm"], default="native", help="`engine.type`")
    parser.add_argument("--paradigms", type=words, default=["multi-version"])
    parser.add_argument("--staleness", type=integers, default=[2])
    parser.add_argument(
        "--in-flight", type=groups, help='`rollout.in_flight`: groups, or "full"; default: the recipe\'s'
    )
    parser.add_argument(
        "--rows", type=int, help="`rollout.rows`, of runs that are not synchronous; default: the recipe's"
    )
    parser.add_argument("--seeds", type=integers, default=[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="updates between evaluations")
    parser.add_argument("--held-out", type=int, default=512, help="test problems of these evaluations")
    parser.add_argument("--test-problems", type=int, help="of the whole test; default: all, 0: leave it out")
    parser.add_argument("--runs", type=Path, help="keep the runs there")
    parser.add_argument("--set", action="append", default=[], help="`key=value` for the recipe")
    return parser


def make_tiny(options: argparse.Namespace, scratch: Path) -> None:
    """Turns the options into those of a run that takes seconds on a CPU."""
    options.model = str(write_tiny_model(scratch / "tiny"))
    options.problems = write_tiny_problems(scratch / "problems")
    options.updates, options.every, options.held_out, options.test_problems = 2, 1, 4, 6
    options.device = "cpu"
    options.set = [
        'runtime.device="cpu"', "rollout.prompts=2", "rollout.group=2", "rollout.max_tokens=12",
        "model.lora={rank = 4}", "training.micro_tokens=256", *options.set,
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            make_tiny(options, Path(scratch))
        for cell in cells_of(options):
            whole = Cell("gsm8k-test", "native", cell.parameters)
            with folder_of(cell, options) as folder:
                cells.measure(cell, lambda: measure(cell, options, folder))  # noqa: B023 - called at once
                if options.test_problems == 0 or not cells.pending([whole]):
                    continue
                if not (folder / "policy").exists():
                    print(f"{whole.name}: left out, because the run is gone; `--runs FOLDER` keeps runs", flush=True)
                    continue
                limit = recipe_of(cell, options).rollout.max_tokens
                cells.measure(whole, lambda: whole_test(options, folder / "policy", limit))  # noqa: B023
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
