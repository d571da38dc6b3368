"""Speed of the native engine on a tiny model: against transformers, with several live versions, and the cost of a step.

    python bench/engine.py --out engine.json

Both sides of a comparison run in the same process, alternating. Figures have their spread over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from stretto.engines.native.engine import NativeEngine
from stretto.models.checksums import checksum
from stretto.models.tiny import tiny_config
from stretto.types import Completion, Request, Sampling, Weights

PROMPT, VOCABULARY, RANK, SLOTS = 24, 20, 8, 4


def tiny_model() -> Any:
    torch.manual_seed(0)
    # `min_new_tokens` keeps the stop token from ending a row early.
    config = tiny_config(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1)
    return Qwen3ForCausalLM(config).eval()


def adapter(model: Any, version: int) -> Weights:
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            tensors[f"{name}.lora_A"] = torch.randn(RANK, module.in_features, generator=generator) * 0.05
            tensors[f"{name}.lora_B"] = torch.randn(module.out_features, RANK, generator=generator) * 0.05
    return Weights(version, "lora", tensors, checksum(tensors, 2.0), 2.0)


def make_engine(model: Any, rows: int, max_context: int) -> NativeEngine:
    engine = NativeEngine(
        model,
        kind="lora",
        slots=SLOTS,
        rows=rows,
        kv_tokens=rows * max_context,
        max_context=max_context,
        lora_rank=RANK,
    )
    for version in range(3):
        engine.load(adapter(model, version))
    return engine


def native_seconds(engine: NativeEngine, prompts: torch.Tensor, lengths: list[int], versions: int) -> float:
    """Adds all requests at once, over `versions` in turn; returns the seconds until the last has finished."""
    began = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True)):
        engine.add(Request(i, i % versions, tuple(prompt), i, Sampling(length)))
    made = 0
    while engine.has_work:
        made += sum(len(done.tokens) for done in engine.step() if isinstance(done, Completion))
    assert made == sum(lengths)
    return time.perf_counter() - began


def transformers_seconds(model: Any, prompts: torch.Tensor, lengths: list[int], rows: int) -> float:
    """Runs static batches in the order given, each to the length of its longest member; returns the seconds."""
    began = time.perf_counter()
    with torch.inference_mode():
        for at in range(0, len(lengths), rows):
            longest = max(lengths[at : at + rows])
            batch = prompts[at : at + rows]
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )
            assert out.shape[1] == prompts.shape[1] + longest
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def best_threads(measure: Callable[[], float], counts: tuple[int, ...]) -> int:
    seconds = {}
    for count in counts:
        torch.set_num_threads(count)
        seconds[count] = measure()
    return min(seconds, key=lambda count: seconds[count])


def against_transformers(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    raw = generator.lognormal(np.log(options.median), options.sigma, options.prompts)
    lengths = [int(n) for n in np.clip(raw.round(), 1, options.max_tokens)]
    prompts = torch.randint(0, VOCABULARY - 1, (options.prompts, PROMPT), generator=torch.Generator().manual_seed(0))
    order = np.argsort(lengths, kind="stable")
    ranked = [lengths[i] for i in order]
    threads = best_threads(
        lambda: transformers_seconds(model, prompts[: options.rows], [32] * options.rows, options.rows), (1, 2)
    )
    torch.set_num_threads(1)
    engine = make_engine(model, options.rows, PROMPT + options.max_tokens)
    native_seconds(engine, prompts[:64], [4] * len(prompts[:64]), 1)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"arrival": [], "sorted": []}
    for _ in range(options.repeats):
        torch.set_num_threads(1)
        ours.append(native_seconds(engine, prompts, lengths, 1))
        torch.set_num_threads(threads)
        theirs["arrival"].append(transformers_seconds(model, prompts, lengths, options.rows))
        theirs["sorted"].append(transformers_seconds(model, prompts[order], ranked, options.rows))
    tokens = sum(lengths)
    return {
        "tokens": tokens,
        "longest": max(lengths),
        "transformers_threads": threads,
        "native_tokens_per_s": spread([tokens / s for s in ours]),
        "transformers_tokens_per_s": {name: spread([tokens / s for s in seconds]) for name, seconds in theirs.items()},
        "ratio": {name: spread([s / o for s, o in zip(sec, ours, strict=True)]) for name, sec in theirs.items()},
        "floor": 4.0,
    }


def versions_live(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = make_engine(model, options.rows, PROMPT + 128)
    prompts = torch.randint(0, VOCABULARY - 1, (4 * options.rows, PROMPT), generator=torch.Generator().manual_seed(1))
    lengths = [64] * len(prompts)
    native_seconds(engine, prompts, lengths, 3)
    one, three = [], []
    for _ in range(options.repeats):
        one.append(native_seconds(engine, prompts, lengths, 1))
        three.append(native_seconds(engine, prompts, lengths, 3))
    ratios = [a / b for a, b in zip(one, three, strict=True)]
    return {
        "three_versions_over_one": spread(ratios),
        "floor": 0.85,
        "tokens_per_s": spread([sum(lengths) / s for s in three]),
    }


def step_cost(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Returns the median milliseconds of a decode step at several numbers of rows, and the line through them."""
    torch.set_num_threads(1)
    rows = [1, 8, 16, 32, 64, 128]
    engine = make_engine(model, max(rows), PROMPT + 128)
    prompts = torch.randint(0, VOCABULARY - 1, (max(rows), PROMPT), generator=torch.Generator().manual_seed(2)).tolist()
    medians = []
    for count in rows:
        for i in range(count):
            engine.add(Request(i, i % 3, tuple(prompts[i]), i, Sampling(100)))
        engine.step()
        seconds = []
        while engine.has_work:
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        medians.append(1e3 * statistics.median(seconds))
    slope, fixed = np.polyfit(rows, medians, 1)
    return {"rows": rows, "ms": medians, "fixed_ms": float(fixed), "us_per_row": 1e3 * float(slope)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--median", type=float, default=48.0, help="median length of a completion, in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the length")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["transformers", "versions", "step"], help="one part alone")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    model = tiny_model()
    parts = {"transformers": against_transformers, "versions": versions_live, "step": step_cost}
    results = {name: part(options, model) for name, part in parts.items() if options.only in (None, name)}
    text = json.dumps({"torch": torch.__version__, **results}, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
