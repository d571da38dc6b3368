"""How long one update takes at the quickstart's shape: 128 sequences of 8 prompt and about 25 completion tokens.

    python bench/training.py --out bench/results/training.json

Also measures what an adapted forward pass costs with PEFT's wrappers against ours, on the same model and tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from stretto.models.loading import second_tree
from stretto.models.lora import inject_lora
from stretto.models.tiny import tiny_config
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Completion, Sample

NUM_GROUPS, GROUP, PROMPT, MEAN_COMPLETION, MAX_COMPLETION = 16, 8, 8, 25, 157


def tiny_model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(tiny_config(vocab_size=vocabulary)).eval()


def quickstart_batch(update: int, vocabulary: int, seed: int = 0) -> Batch:
    """Log-normal lengths with one sequence at the cap; log-probabilities near those of an untrained model."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(MEAN_COMPLETION) - 0.18, 0.6, NUM_GROUPS * GROUP), 2, MAX_COMPLETION)
    lengths[0] = MAX_COMPLETION
    samples = []
    for index, length in enumerate(lengths.astype(int)):
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        completion = Completion(index, update, tokens, logprobs, "stop", "")
        prompt = tuple(draw.integers(0, vocabulary, PROMPT).tolist())
        samples.append(Sample(index, index // GROUP, update, prompt, completion, float(draw.integers(0, 2))))
    return Batch(update, samples)


def milliseconds(work: Callable[[], object], repeats: int) -> dict[str, float]:
    for _ in range(3):
        work()
    wall, processor = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        work()
        wall.append((time.perf_counter() - started) * 1e3)
        processor.append((time.process_time() - used) * 1e3)
    return {
        "median": statistics.median(wall),
        "min": min(wall),
        "max": max(wall),
        "processor": statistics.median(processor),  # says more than the wall where others use the machine
    }


def measure_update(
    lora: LoraOptions | None, threads: int, repeats: int, vocabulary: int, micro: int
) -> dict[str, float]:
    torch.set_num_threads(threads)
    trainer = LocalTrainer(tiny_model(vocabulary), lora=lora, options=TrainingOptions(micro_tokens=micro))
    batch = quickstart_batch(0, vocabulary)
    return milliseconds(lambda: trainer.update(Batch(trainer.version, batch.samples)), repeats)


def measure_wrappers(repeats: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """One forward pass over 64 tokens, where the cost of the wrappers is not hidden by the multiplications."""
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)
    plain, ours = tiny_model(vocabulary), tiny_model(vocabulary)
    names = inject_lora(ours, 8, 16.0)
    wrapped = second_tree(plain, share=False)
    theirs = get_peft_model(wrapped, LoraConfig(r=8, lora_alpha=16, target_modules=list(names))).base_model.model
    tokens = torch.arange(64)[None] % vocabulary
    with torch.no_grad():
        models = {"without adapters": plain, "ours": ours, "peft": theirs}
        return {
            name: milliseconds(lambda m=model: m(tokens, use_cache=False), repeats) for name, model in models.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=20)
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    results: dict[str, object] = {"torch": torch.__version__, "machine": platform.machine(), "updates_ms": {}}
    updates: dict[str, dict[str, float]] = {}
    for kind, lora in (("lora rank 8", LoraOptions(rank=8)), ("full", None)):
        for threads in arguments.threads:
            case = f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
            updates[case] = measure_update(
                lora, threads, arguments.repeats, arguments.vocabulary, arguments.micro_tokens
            )
            wall, processor = updates[case]["median"], updates[case]["processor"]
            print(f"{case:24} {wall:7.1f} ms an update ({processor:.1f} ms of processor time)")
    wrappers = measure_wrappers(5 * arguments.repeats, arguments.vocabulary)
    for name, times in wrappers.items():
        print(f"forward, {name:16} {times['median']:6.2f} ms")
    results |= {"updates_ms": updates, "forward_ms": wrappers, "settings": {**vars(arguments), "out": None}}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
