"""Where a decode step of a real model spends its time: milliseconds of each kernel, at several numbers of rows.

    python -m bench.gpu.step_profile --model models/qwen2.5-coder-0.5b --rows 512,1024,1536 --out RESULTS

All rows decode under one of `VERSIONS` LoRA versions, with contexts that are spread evenly between `PROMPT` and
`PROMPT + SPREAD` tokens, as in the middle of a rollout of short answers. `step_ms` is by the host's clock, the median
over `STEPS` steps without the profiler: a step that captures a graph takes several times as long. `kernels` are the
milliseconds of a step by kernel, from torch's profiler over as many steps more. A part of a step in which no kernel
runs is in `step_ms` alone.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu.cells import Cell, add_options, from_options, integers
from bench.gpu.problems import write_tiny_model
from bench.gpu.shapes import adapter
from stretto.engines.native.engine import NativeEngine
from stretto.models.loading import load_model
from stretto.types import Request, Sampling

VERSIONS, RANK = 3, 32
PROMPT, SPREAD, GROUP = 128, 384, 8
PREFILL = 8_192
WARM_STEPS, STEPS = 24, 24
SHOWN = 14  # kernels that are printed


def fill(engine: NativeEngine, rows: int, vocabulary: int, prompt: int, spread: int, tokens: int) -> None:
    """Adds a request of so many tokens for each row, and steps until all prompts are prefilled."""
    generator, groups, prompts = torch.Generator().manual_seed(rows), -(-rows // GROUP), 0
    for group in range(groups):
        length = prompt + group * spread // groups
        drawn = tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())
        prompts += length
        for id in range(group * GROUP, min(rows, (group + 1) * GROUP)):
            engine.add(Request(id, group % VERSIONS, drawn, id, Sampling(tokens), group=group))
    while engine.report().prefilled < prompts:
        engine.step()


def short_name(name: str) -> str:
    """A kernel's name without its template arguments and its namespaces."""
    plain = re.sub(r"^void ", "", name).split("<")[0].split("(")[0]
    return plain.split("::")[-1][:60]


def kernel_times(engine: NativeEngine, steps: int) -> dict[str, float]:
    """Milliseconds of a step by kernel, longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            found[short_name(event.name)] += event.device_time / 1e3 / steps
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def measure(model: Any, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Times the steps of a batch, with and without the profiler."""
    warm, steps = (2, 2) if options.tiny else (WARM_STEPS, STEPS)
    prompt, spread = (8, 8) if options.tiny else (PROMPT, SPREAD)
    # A row that has its prompt decodes while others are prefilled, 8,192 tokens a step.
    context = prompt + spread + warm + 2 * steps + rows * (prompt + spread) // GROUP // PREFILL + 32
    engine = NativeEngine(
        model,
        kind="lora",
        slots=VERSIONS,
        rows=rows,
        kv_tokens=rows * context,
        max_context=context,
        lora_rank=RANK,
        prefill_tokens=PREFILL,
    )
    for version in range(VERSIONS):
        engine.load(adapter(model, version, rank=RANK))
    fill(engine, rows, model.config.vocab_size, prompt, spread, context - prompt - spread)
    for _ in range(warm):
        engine.step()
    _synchronize(options.device)
    seconds = []
    for _ in range(steps):  # each waits for the results of the step before it
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    _synchronize(options.device)
    step_ms = statistics.median(seconds) * 1e3
    kernels = {} if options.device == "cpu" else kernel_times(engine, steps)
    engine.close()
    for name, each in list(kernels.items())[:SHOWN]:
        print(f"  {each:8.3f} ms  {name}", flush=True)
    return {
        "step_ms": step_ms,
        "us_per_row": step_ms / rows * 1e3,
        "kernels_ms": sum(kernels.values()),
        "tokens_per_s": rows / step_ms * 1e3,
        "kernels": kernels,
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--model", default="models/qwen2.5-coder-0.5b", help="a folder, or a hub name")
    parser.add_argument("--rows", type=integers, default=[512, 1024, 1536])
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            options.model, options.device = str(write_tiny_model(Path(scratch) / "tiny")), "cpu"
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        model = load_model(options.model, dtype, torch.device(options.device), option="--model")
        for rows in options.rows:
            cell = Cell("step-profile", "native", {"model": Path(options.model).name, "rows": rows})
            cells.measure(cell, lambda: measure(model, options, rows))  # noqa: B023 - called at once
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
