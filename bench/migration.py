"""What it costs to move a trajectory from one instance to another: with its KV, or prefilled again.

    python bench/migration.py --out bench/results/migration.json

Two native engines of the tiny model in one process, on one core. A trajectory of some context is suspended on the one
and resumed on the other; the time of the move is from the call of `suspend` to the token after the resume, less one
decode step: the least of twenty repetitions, because others use the machine too. `pickled` is what it takes where the
KV is packed and unpacked on its way, as between two processes. The context above which carrying is cheaper is
interpolated between those that were measured.

Floor: suspending and resuming with KV costs less than ten decode steps, at every context, packed or not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import Failed
from stretto.models.loading import load_model
from stretto.models.tiny import WarmStart, tiny_model
from stretto.training.trainer import LocalTrainer
from stretto.types import Request, Sampling, Weights

CONTEXTS = (9, 16, 32, 64, 128, 256, 512, 1024, 2048)
REPETITIONS = 20
FLOOR_STEPS = 10.0
HOWS = ("with_kv", "pickled", "prefilled_again")


def engines(model: Any) -> tuple[NativeEngine, NativeEngine]:
    first, second = (
        NativeEngine(model, kind="full", slots=1, rows=8, kv_tokens=8192, max_context=4096, prefill_tokens=4096)
        for _ in range(2)
    )
    return first, second


def until_next_token(engine: NativeEngine) -> None:
    """Step until one more token has been drawn."""
    before = engine.report().tokens
    while engine.report().tokens == before:
        for ended in engine.step():
            assert not isinstance(ended, Failed), ended


def step_s(engine: NativeEngine, count: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    return (time.perf_counter() - began) / count


def move(source: NativeEngine, target: NativeEngine, id: int, how: str) -> tuple[float, int]:
    """Seconds from the suspension to the next token elsewhere, and the bytes that were carried."""
    began = time.perf_counter()
    (taken,) = source.suspend([id], kv=how != "prefilled_again")
    if how == "pickled":
        taken = pickle.loads(pickle.dumps(taken, protocol=pickle.HIGHEST_PROTOCOL))
    target.add(taken)
    until_next_token(target)
    return time.perf_counter() - began, 0 if taken.kv is None else int(taken.kv.nbytes)


def measure(first: NativeEngine, second: NativeEngine, context: int) -> dict[str, Any]:
    prompt = tuple(3 + n % 80 for n in range(context - 8))
    seconds: dict[str, list[float]] = {how: [] for how in HOWS}
    steps, num_bytes, id = [], 0, 0
    for _ in range(REPETITIONS):
        for how in HOWS:
            id += 1
            first.add(Request(id, 0, prompt, seed=id, sampling=Sampling(1024)))
            for _ in range(8):
                until_next_token(first)
            steps.append(step_s(first, 4))
            took, carried = move(first, second, id, how)
            seconds[how].append(took)
            num_bytes = max(num_bytes, carried)
            second.abort([id])
    step = min(steps)
    cost = {how: max(0.0, min(each) - step) for how, each in seconds.items()}
    return {
        "context": context,
        "bytes": num_bytes,
        "decode_step_ms": 1e3 * step,
        **{f"{how}_ms": 1e3 * each for how, each in cost.items()},
        **{f"{how}_in_steps": each / step for how, each in cost.items()},
    }


def crossing(cells: Sequence[dict[str, Any]], how: str) -> float | None:
    """The context above which carrying is cheaper at every larger one that was measured; None where it never is."""
    gains = [(cell["context"], cell["prefilled_again_ms"] - cell[f"{how}_ms"]) for cell in cells]
    found: float | None = None
    for (context, gain), later in zip(reversed(gains), [None, *reversed(gains)], strict=False):
        if gain < 0:
            if later is None:
                return None
            share = -gain / (later[1] - gain)
            return context + share * (later[0] - context)
        found = float(context)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = load_model(str(tiny_model(warm_start=WarmStart(steps=0))), torch.float32, torch.device("cpu"))
    first, second = engines(model)
    weights: Weights = LocalTrainer(model).weights(0)
    first.load(weights)
    second.load(weights)
    measure(first, second, 64)  # warm
    cells = [measure(first, second, context) for context in CONTEXTS]
    largest = cells[-1]
    most = max(max(cell["with_kv_in_steps"], cell["pickled_in_steps"]) for cell in cells)
    result = {
        "what": "a trajectory moves between two instances of the tiny model in one process, float32, one core",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "kv_bytes_per_token": first.capacity.kv_bytes_per_token,
        "cells": cells,
        "load_average": os.getloadavg()[0],
        "carrying_is_cheaper_above_tokens": crossing(cells, "with_kv"),
        "carrying_packed_is_cheaper_above_tokens": crossing(cells, "pickled"),
        "bytes_per_s": largest["bytes"] / max(1e-9, largest["with_kv_ms"] / 1e3),
        "prefill_tokens_per_s": largest["context"] / max(1e-9, largest["prefilled_again_ms"] / 1e3),
        "most_steps": most,
        "floor_steps": FLOOR_STEPS,
        "met": most < FLOOR_STEPS,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
