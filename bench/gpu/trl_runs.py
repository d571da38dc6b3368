"""What both of TRL's sides of GSM8K share: options, training data, the clock, and what a cell says.

`bench.gpu.trl_gsm8k` measures `GRPOTrainer`, `bench.gpu.trl_async_gsm8k` the asynchronous trainer. Nothing here imports
TRL before it is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.cells import Cell, Parameter, read_cells
from bench.gpu.problems import Score, read_problems, write_tiny_model, write_tiny_problems

REWARD = "stretto.environments.rewards.mathematics:reward"
MARGIN = 16  # tokens of context beyond the longest prompt and completion


# -- the clock ---------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds of training: stands still while it is paused."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._counted = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._counted + (0.0 if self._since is None else self._now() - self._since)

    def run(self) -> None:
        self._since = self._now()

    def pause(self) -> None:
        self._counted, self._since = self.seconds, None


def synchronized() -> float:
    """The host's clock after everything that the device was given to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clear_memory() -> None:
    """Gives back what the trainer before has left; one that ran out of memory is held by its error until here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# -- TRL ---------------------------------------------------------------------------------------------------------------


def training_rows(options: argparse.Namespace, groups: int, updates: int) -> list[dict[str, Any]]:
    """The training problems in an order of the seed, at least as many as an update needs."""
    problems = list(read_problems(options.problems, "train"))
    random.Random(options.seed).shuffle(problems)
    needed = max(groups, min(groups * updates, len(problems)))
    rows = [{"prompt": each["messages"], "answer": each["answer"]} for each in problems]
    while len(rows) < needed:
        rows += rows
    return rows


def lora_of(options: argparse.Namespace) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")


def config_of(kind: Any, wanted: Mapping[str, Any]) -> Any:
    """A configuration of TRL's; a name that it does not know is an error that says so."""
    if unknown := set(wanted) - {field.name for field in dataclasses.fields(kind)}:
        raise RuntimeError(
            f"this TRL's `{kind.__name__}` does not know {sorted(unknown)}; the bench was written for 1.16"
        )
    return kind(**wanted)


def quiet(trainer: Any) -> Any:
    """A recorder follows the run; TRL's own printing of every metric is no part of what is measured."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


# -- what a cell says --------------------------------------------------------------------------------------------------


def run_cells(side: str, options: argparse.Namespace, setting: Mapping[str, Parameter]) -> tuple[Cell, Cell]:
    """The cell of a measured run, and that of the whole test after it."""
    parameters: dict[str, Parameter] = {"model": Path(options.model).name, "seed": options.seed}
    parameters |= {"seconds": options.seconds, "reward": options.reward.split(":")[-1], **setting}
    return Cell("gsm8k", side, parameters), Cell("gsm8k-test", side, parameters)


def sweep_cell(side: str, options: argparse.Namespace, groups: int, setting: Mapping[str, Parameter]) -> Cell:
    """The cell of a setting that is tried with so many prompts an update."""
    shared = {"model": Path(options.model).name, "groups": groups, "max_tokens": options.max_tokens}
    return Cell("gsm8k-sweep", side, {**shared, **setting})


def sweep_records(
    side: str, options: argparse.Namespace, setting_of: Callable[[Mapping[str, Any]], object], names: Sequence[str]
) -> list[dict[str, Any]]:
    """What each setting of the sweeps under `--out` and `--known` came to: these results, or why there are none."""
    shown = (*names, "does_not_fit", "failed")
    return [
        {
            "setting": str(setting_of(record["parameters"])),
            "groups": record["parameters"]["groups"],
            "model": record["parameters"]["model"],
            **{name: record["results"][name] for name in shown if name in record["results"]},
        }
        for record in read_cells([*options.known, options.out])
        if record["bench"] == "gsm8k-sweep" and record["side"] == side
    ]


def said(arguments: Any, names: Sequence[str], setting: str, options: argparse.Namespace) -> dict[str, Any]:
    """How TRL was set up: what was asked for, and its own values of the named arguments."""
    given = {"setting": setting, "lora_rank": options.rank, "lora_alpha": 2 * options.rank, "dtype": options.dtype}
    own = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    plain = {name: value if isinstance(value, int | float | None) else str(value) for name, value in own.items()}
    return {**given, **plain, "peak_gib": peak}


def point(version: int, found: Score, clocks: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """A point of the curve: the score after `version` updates, and what it took to ask for it."""
    print(f"version {version}: {found.accuracy:.3f} after {clocks['elapsed_s']:.1f} s", flush=True)
    scored = {"version": version, "score": found.accuracy, "num_scored": found.num_problems}
    return {**scored, "mean_tokens": found.mean_tokens, "truncated": found.truncated, **clocks, "seconds": seconds}


def results(
    startup_s: float, points: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a run came to. Rates are over all updates but the first."""
    scores = {int(each["version"]): each["score"] for each in points}
    found: dict[str, Any] = {"startup_s": startup_s, "evaluations": list(points), "by_update": list(updates)}
    if scores:
        before, after = scores.get(0), scores[max(scores)]
        found |= {"eval_before": before, "eval_after": after, "eval_best": max(scores.values())}
    if updates:
        first, later = updates[0]["elapsed_s"], updates[1:]
        found |= {"first_update_s": first, "wall_s": updates[-1]["elapsed_s"], "updates": len(updates)}
        if later:
            seconds, tokens = found["wall_s"] - first, sum(update["tokens"] for update in later)
            found |= {
                "tokens_per_s": tokens / seconds,
                "seconds_per_update": seconds / len(later),
                "rollout_and_scoring_s_per_update": sum(update["rollout_s"] for update in later) / len(later),
                "training_s_per_update": sum(update["training_s"] for update in later) / len(later),
                "length_mean": sum(update["length_mean"] for update in later) / len(later),
            }
    return found


def whole_test(ask: Callable[[float], Score]) -> dict[str, Any]:
    """The whole test after training, sampled at temperature 1 and greedy; `ask` takes the temperature."""
    began, after = time.perf_counter(), dict[str, dict[str, Any]]()
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        after[way] = ask(temperature).as_json()
    flat = {f"after_{way}": found["accuracy"] for way, found in after.items()}
    return {**flat, "seconds": time.perf_counter() - began, "after": after}


# -- the command line --------------------------------------------------------------------------------------------------


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The task, what is trained, and how it is evaluated."""
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct", help="a folder, or a hub name")
    parser.add_argument("--problems", type=Path, default=Path("data/gsm8k"), help="what `examples/gsm8k.py` made")
    parser.add_argument("--reward", default=REWARD)
    parser.add_argument("--seconds", type=float, default=600.0, help="of training, after the first update")
    parser.add_argument("--updates", type=int, default=1_000, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=32, help="of LoRA, on all linear layers; alpha is twice as much")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--groups", type=int, default=64, help="prompts an update")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-prompt", type=int, default=384, help="room for the longest prompt, in tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--every", type=int, default=8, help="updates between evaluations")
    parser.add_argument("--held-out", type=int, default=512, help="test problems of these evaluations")
    parser.add_argument("--test-problems", type=int, help="of the whole test; default: all, 0: leave it out")


def tiny_run(options: argparse.Namespace, scratch: Path, head_size: int = 16) -> None:
    """Turns the options into those of a run that takes seconds on a CPU."""
    options.model = str(write_tiny_model(scratch / "tiny", head_size))
    options.problems = write_tiny_problems(scratch / "problems")
    options.device, options.dtype = "cpu", "float32"
    options.groups, options.group, options.sweep_groups = 2, 2, 2
    options.max_tokens, options.rank, options.every = 8, 4, 2
    options.held_out, options.test_problems = 3, 4
