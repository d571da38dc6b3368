"""Publish: how long a new version stalls decoding.

    python -m bench.gpu.publish --out RESULTS --resume

An engine with two slots decodes `--rows` rows of version 0. Between two steps another version is loaded into the free
slot, its checksum confirmed there, and unloaded again later, `--publishes` times. By the host's clock

    stall_ms = (load + the step after it) - an ordinary step

which is exact although the host runs a step behind: before and after, a step returns when the device has just begun the
one that it launched. `device_gap_ms` says the same by the device's clock: from the end of the step before to the end of
the step after, less what lies between two ordinary ends. `weights_s` is the trainer's copy with its checksum, made
before. `limit_ms` is what publishing may cost: a step with adapters, 10 ms with full weights.

Bytes of full weights: read and written by the copy, read by the checksum, so 3 x 3.4 GB at 1.7B, 2.4 ms at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.cells import Cell, add_options, from_options, integers, release_memory, words
from bench.gpu.native_side import lengths, num_captured
from bench.gpu.shapes import RANK, make_model
from bench.gpu.sides import prompts
from stretto.engines.native.engine import NativeEngine
from stretto.models.lora_options import LoraOptions
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer
from stretto.types import Request, Sampling, Weights

LIMIT_FULL_MS = 10.0
WARM_STEPS = 4  # after the prefill, and after a version is unloaded
MARGIN = 64  # tokens a row beyond what is decoded: pages are whole, and rows whose prefill came first are ahead


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of publishes took, in ms: a value a publish, and a value an ordinary step."""

    load: list[float]
    load_and_step: list[float]
    steps: list[float]
    device_load_and_step: list[float]  # empty where the device has no clock
    device_steps: list[float]
    captured: int

    def results(self) -> dict[str, Any]:
        step = statistics.fmean(self.steps)
        stalls = [both - step for both in self.load_and_step]
        results = {
            "step_ms": step,
            "load_ms": statistics.median(self.load),
            "load_ms_max": max(self.load),
            "stall_ms": statistics.median(stalls),
            "stall_ms_max": max(stalls),
            "captured": self.captured,
        }
        if self.device_steps:
            gaps = [both - statistics.fmean(self.device_steps) for both in self.device_load_and_step]
            results |= {"device_gap_ms": statistics.median(gaps), "device_gap_ms_max": max(gaps)}
        return results


class Publisher:
    """An engine with two slots beside a trainer of the same kind, over one model."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._options, self._device = options, torch.device(options.device)
        model = make_model(options.size, options.device)
        rows = max(options.rows)
        # Rows of the first prompts are ahead by as many steps as the prefill of all takes.
        ahead = -(-rows * options.prompt // options.prefill_tokens)
        self._tokens = ahead + WARM_STEPS + options.publishes * (options.steps + 2 * WARM_STEPS + 1) + MARGIN
        context = options.prompt + self._tokens + MARGIN
        self.engine = NativeEngine(
            model,
            kind="lora" if kind == "lora" else "full",
            slots=2,
            rows=rows,
            kv_tokens=rows * context,
            max_context=context,
            lora_rank=RANK if kind == "lora" else None,
            prefill_tokens=options.prefill_tokens,
        )
        lora = LoraOptions(rank=RANK) if kind == "lora" else None
        # Nothing is trained here, so nothing has to be compiled.
        self.trainer = LocalTrainer(model, lora=lora, options=TrainingOptions(compile=False))
        self._weights, self.weights_s = self._take_weights()
        self.engine.load(self._weights)
        self._next_id = 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _take_weights(self) -> tuple[Weights, list[float]]:
        """The trainer's weights, and the seconds that each of several copies took."""
        seconds = []
        for _ in range(3):
            self._synchronize()
            began = time.perf_counter()
            weights = self.trainer.weights(self.trainer.version)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return weights, seconds

    @property
    def version_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.tensors.values())

    def round(self, rows: int) -> Round:
        """Fill the rows, publish some times, empty them again. Every round does the same, step for step."""
        engine, options, captured = self.engine, self._options, num_captured(self.engine)
        ids = range(self._next_id, self._next_id + rows)
        self._next_id += rows
        to_prefill = engine.report().prefilled + rows * options.prompt
        for id, prompt in zip(ids, prompts(rows, options.prompt, options.size, seed=17), strict=True):
            engine.add(Request(id, 0, prompt, id, Sampling(self._tokens)))
        while engine.report().prefilled < to_prefill:
            engine.step()
        self._steps(WARM_STEPS)
        made = Round([], [], [], [], [], 0)
        for publish in range(options.publishes):
            self._publish(made, publish + 1)
        engine.abort(list(ids))
        return replace(made, captured=num_captured(engine) - captured)

    def _publish(self, made: Round, version: int) -> None:
        """Ordinary steps, one load, the step after it; then the version goes again, outside of what is timed."""
        engine, weights, count = self.engine, replace(self._weights, version=version), self._options.steps
        marks = [self._mark()]
        began = time.perf_counter()
        for _ in range(count):
            self._steps(1)
            marks.append(self._mark())
        before = time.perf_counter()
        engine.load(weights)
        loaded = time.perf_counter()
        self._steps(1)
        after = time.perf_counter()
        marks.append(self._mark())
        made.steps.append(1e3 * (before - began) / count)
        made.load.append(1e3 * (loaded - before))
        made.load_and_step.append(1e3 * (after - before))
        self._steps(WARM_STEPS)
        engine.unload(version)
        self._steps(WARM_STEPS)
        ends = [mark for mark in marks if mark is not None]
        if ends:
            self._synchronize()
            between = [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]
            made.device_steps.append(statistics.fmean(between[:-1]))
            made.device_load_and_step.append(between[-1])

    def _steps(self, count: int) -> None:
        for _ in range(count):
            if lengths(self.engine.step()):
                raise RuntimeError("a row ended inside the timed steps: the tokens asked for were too few")

    def _mark(self) -> torch.cuda.Event | None:
        """The end, on the device, of what the engine has launched so far."""
        if self.engine._stream is None:
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(self.engine._stream)
        return mark


def cells_of(kind: str, options: argparse.Namespace) -> list[Cell]:
    common = {"size": options.size, "kind": kind, "prompt": options.prompt}
    return [Cell("publish", "native", {**common, "batch": rows}) for rows in options.rows]


def measure(kind: str, options: argparse.Namespace) -> None:
    """All cells of one kind, with one engine and trainer."""
    cells = from_options(options)
    pending = cells.pending(cells_of(kind, options))
    if not pending:
        return
    publisher = Publisher(kind, options)

    def one(cell: Cell) -> dict[str, Any]:
        rows = int(cell.parameters["batch"])
        publisher.round(rows)  # captures and compiles whatever the next one needs
        return {
            **with_limit(publisher.round(rows).results(), kind),
            "weights_s": min(publisher.weights_s),
            "all_weights_s": publisher.weights_s,
            "version_bytes": publisher.version_bytes,
        }

    for cell in pending:
        cells.measure(cell, lambda cell=cell: one(cell))


def with_limit(results: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results beside what publishing may cost."""
    limit = results["step_ms"] if kind == "lora" else LIMIT_FULL_MS
    return {**results, "limit_ms": limit, "within_limit": results["stall_ms"] < limit}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--kinds", type=words, default=["lora", "full"])
    parser.add_argument("--rows", type=integers, default=[256, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--publishes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="ordinary steps timed before each publish")
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.rows, options.prompt, options.publishes = "tiny", [3], 8, 2
        options.steps, options.prefill_tokens = 2, 64
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.sitting = from_options(options).sitting
    for kind in options.kinds:
        measure(kind, options)
        release_memory(options.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
