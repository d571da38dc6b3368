"""What a decode step costs, `a + b * rows + c * context`, what training costs, and the gain that they allow at best.

    python -m bench.gpu.costs --out RESULTS --resume

`step` cells: filled steps at several (rows, context) with three adapters mixed. `training` cells: one update alone on
the device, for each tail and batch. On one device the ideal gain of full rows over synchronous training is

    (a * longest + b * tokens + kv + training) / (a * tokens / rows + b * tokens + kv + training)

with `kv = c * (sum over tokens of the context that each reads)`, which no paradigm saves, and `longest` summed over the
updates. The report computes it for the very lengths of the runs that it stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell, add_options, from_options, integers, words
from bench.gpu.decode import asks
from bench.gpu.lengths import TAILS
from bench.gpu.native_side import NativeSide
from bench.gpu.rollout import GROUP, GROUPS
from bench.gpu.runs import synthetic_batch
from bench.gpu.shapes import RANK, make_model
from bench.gpu.sides import SLOTS
from stretto.models.lora_options import LoraOptions
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a decode step: `a`, `b` a row, `c` a token of context over all rows."""

    a: float
    b: float
    c: float

    def seconds(self, rows: float, context_tokens: float) -> float:
        return self.a + self.b * rows + self.c * context_tokens


def fit(points: Sequence[tuple[float, float, float]]) -> StepCost:
    """The cost through (rows, context tokens over all rows, seconds), relative errors least, no part below zero.

    A part that would come out negative is left out, and the rest fitted again.
    """
    table = np.asarray(points, dtype=np.float64)
    design = np.stack((np.ones(len(table)), table[:, 0], table[:, 1]), 1) / table[:, 2:]
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(design[:, kept], np.ones(len(table)), rcond=None)
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    parts = np.zeros(3)
    parts[kept] = found
    return StepCost(*parts.tolist())


def ideal_gain(
    cost: StepCost, batches: Sequence[Sequence[int]], prompt: int, rows: int, training_s: float
) -> dict[str, float]:
    """Seconds of these updates, synchronous and with rows always full, and their ratio.

    `batches` are the lengths of each update's trajectories, `training_s` the training of all of them together.
    """
    every = [length for batch in batches for length in batch]
    kv = cost.c * sum(prompt * n + n * (n + 1) / 2 for n in every)
    common = cost.b * sum(every) + kv + training_s
    synchronous = cost.a * sum(max(batch) for batch in batches) + common
    full = cost.a * sum(every) / rows + common
    return {"synchronous_s": synchronous, "full_rows_s": full, "kv_s": kv, "gain": synchronous / full}


def batch_lengths(tail: str, groups: int, updates: int = 1, seed: int = 0) -> list[list[int]]:
    """The lengths of the first updates of `bench.gpu.update`, an update each: the first of many draws are the same."""
    return TAILS[tail].draw(updates * groups * GROUP, seed).reshape(updates, groups * GROUP).tolist()


def step_cells(options: argparse.Namespace) -> list[Cell]:
    common = {"size": options.size, "lora": SLOTS, "tokens": options.steps}
    return [
        Cell("step", "native", {**common, "batch": rows, "prompt": context})
        for context in options.contexts
        for rows in options.rows
    ]


def measure_steps(options: argparse.Namespace) -> None:
    cells = from_options(options)
    pending = cells.pending(step_cells(options))
    if not pending:
        return
    side = NativeSide(options.size, lora=True, device=options.device, prefill_tokens=options.prefill_tokens)
    room = side.room()

    def need(cell: Cell) -> tuple[int, int]:
        batch, prompt = int(cell.parameters["batch"]), int(cell.parameters["prompt"])
        context = prompt + options.steps + 64 + side.steps_ahead(asks(cell, 1, seed=0))
        return batch * context, context

    fits = [cell for cell in pending if need(cell)[0] <= room]
    if not fits:
        raise ValueError(f"none of `--rows` by `--contexts` fits into {room:,} tokens of KV")
    side.prepare(
        max(int(cell.parameters["batch"]) for cell in fits),
        max(need(cell)[0] for cell in fits),
        max(need(cell)[1] for cell in fits),
    )

    def one(cell: Cell) -> dict[str, Any]:
        outcomes = [side.filled_steps(asks(cell, 1, seed=7), options.steps) for _ in range(options.repeats)]
        ms = min(outcome.details["step_ms"] for outcome in outcomes)  # the first may capture
        return {"step_ms": ms, "context_mean": outcomes[-1].details["context_mean"]}

    for cell in fits:
        cells.measure(cell, lambda cell=cell: one(cell))


def training_cells(options: argparse.Namespace) -> list[Cell]:
    common = {"size": options.size, "prompt": options.prompt, "micro": options.micro_tokens}
    return [
        Cell("training", "native", {**common, "tail": tail, "groups": groups})
        for tail in options.tails
        for groups in GROUPS[tail]
    ]


def measure_training(options: argparse.Namespace) -> None:
    cells = from_options(options)
    pending = cells.pending(training_cells(options))
    if not pending:
        return
    model = make_model(options.size, options.device)
    trainer = LocalTrainer(
        model, lora=LoraOptions(rank=RANK), options=TrainingOptions(micro_tokens=options.micro_tokens)
    )

    def update(lengths: Sequence[int]) -> float:
        batch = synthetic_batch(trainer.version, lengths, options.prompt, options.size)
        began = time.perf_counter()
        trainer.update(batch)
        trainer.weights(trainer.version)
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def one(cell: Cell) -> dict[str, Any]:
        (lengths,) = batch_lengths(str(cell.parameters["tail"]), int(cell.parameters["groups"]))
        update(lengths)
        seconds = [update(lengths) for _ in range(options.repeats)]
        return {"training_s": statistics.median(seconds), "seconds": seconds, "tokens": sum(lengths)}

    for cell in pending:
        cells.measure(cell, lambda cell=cell: one(cell))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--rows", type=integers, default=[1, 16, 64, 128, 256, 512])
    parser.add_argument("--contexts", type=integers, default=[256, 1_024])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--tails", type=words, default=["short", "published"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    parser.add_argument("--parts", type=words, default=["step", "training"])
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.rows, options.contexts, options.steps, options.tails = "tiny", [1, 4], [16], 4, ["tiny"]
        options.prompt, options.prefill_tokens, options.micro_tokens, options.repeats = 8, 64, 256, 1
    if "step" in options.parts:
        measure_steps(options)
    if "training" in options.parts:
        measure_training(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
