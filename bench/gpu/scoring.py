"""The cost of scoring a batch under the versions that sampled it, against one forward pass over the batch.

    python -m bench.gpu.scoring --out bench/results/gpu/scoring.json
    python -m bench.gpu.scoring --tiny                       # a tiny shape on the processor: does it run

The batch is that of `bench/gpu/training.py`, with its trajectories spread over several older versions. The two are
measured in turns in one process, so that the ratio does not depend on what else the machine does. With full weights,
`device` versions lie on the GPU and parameters point at them; `host` versions are copied in from host memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.training import SHAPE, TINY, batch_of, keep, model_of
from stretto.objectives.dora import DoraOptions
from stretto.training.mini_batches import micro_batch_plans, split_batch
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Weights


def spread_over_versions(batch: Batch, versions: dict[int, Weights]) -> Batch:
    """The batch of the update after the newest of `versions`, its samples taken from them in turn."""
    samples = [replace(sample, version=index % len(versions)) for index, sample in enumerate(batch.samples)]
    return Batch(len(versions), samples, versions)


def seconds_of(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(kind: str, place: str, arguments: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """One setting: seconds of a forward pass, of scoring, and their ratio."""
    trainer = LocalTrainer(
        model_of(arguments.shape, arguments.device, arguments.dtype),
        lora=LoraOptions(rank=arguments.rank) if kind == "lora" else None,
        options=TrainingOptions(micro_tokens=arguments.micro_tokens),
        algorithm=DoraOptions(average_tokens=arguments.cap),
    )
    weights = trainer.weights(0)
    weights = weights.on_host() if place == "host" else weights
    stale = spread_over_versions(batch, {v: replace(weights, version=v) for v in range(arguments.versions)})
    mini_batches = split_batch(stale.samples, trainer.algorithm, num_steps=1, micro_tokens=arguments.micro_tokens)

    def forward() -> None:
        with trainer.packed.as_in_training():
            for plan in micro_batch_plans(mini_batches):
                trainer.packed.logprobs(trainer._pack(stale, plan), trainer.temperature)[0].detach()

    def score() -> None:
        trainer.preparation.scorer.score(stale, mini_batches)

    with torch.inference_mode(False):
        for _ in range(arguments.warmup):
            forward()
            score()
        pairs = [
            (seconds_of(forward, arguments.device), seconds_of(score, arguments.device))
            for _ in range(arguments.repeats)
        ]
    ratios = [scored / once for once, scored in pairs]
    return {
        "kind": kind,
        "versions_on": place,
        "versions": arguments.versions,
        "tokens": sum(len(s.prompt) + len(s.completion.tokens) - 1 for s in batch.samples),
        "forward_s": statistics.median(once for once, _ in pairs),
        "score_s": statistics.median(scored for _, scored in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the processor")
    parser.add_argument("--settings", nargs="+", default=["lora:device", "full:device", "full:host"])
    parser.add_argument("--versions", type=int, default=4, help="older versions in the batch")
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.device, arguments.shape, arguments.dtype = "cuda", SHAPE, torch.bfloat16
    arguments.groups, arguments.members, arguments.prompt, arguments.seed = 16, 8, 128, 0
    arguments.median, arguments.sigma, arguments.cap = 600, 1.2, 16384
    if arguments.tiny:
        arguments.device, arguments.shape, arguments.dtype = "cpu", TINY, torch.float32
        arguments.groups, arguments.members, arguments.prompt, arguments.median, arguments.cap = 4, 4, 5, 24, 80
        arguments.micro_tokens = 256
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device: use `--tiny` to try the command on the processor")
    return arguments


def main() -> None:
    arguments = parse()
    batch = batch_of(arguments, arguments.shape["vocab_size"])
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    results: dict[str, Any] = {"torch": torch.__version__, "device": device, "settings": []}
    for setting in arguments.settings:
        kind, place = setting.split(":")
        found = measure(kind, place, arguments, batch)
        low, high = min(found["ratios"]), max(found["ratios"])
        print(
            f"{setting:12} {found['versions']} versions: forward {found['forward_s']:.3f} s, scoring "
            f"{found['score_s']:.3f} s, ratio {found['ratio']:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
        results["settings"].append(found)
        keep(results, arguments)


if __name__ == "__main__":
    main()
