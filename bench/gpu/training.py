"""How long an update takes on a GPU, and how much of its arithmetic it uses: Qwen3-1.7B's shape with random weights.

    python bench/gpu/training.py --out bench/results/gpu/training.json
    python bench/gpu/training.py --tiny                      # a tiny shape on the processor: does it run

The batch is 16 groups of 8 trajectories, prompts of 128 tokens, completions log-normal (median 600, sigma 1.2, at most
16,384). Each setting is a trainer of its own: one update to warm up (and to compile), then the measured ones. A setting
that runs out of memory is reported as such, and the next one goes on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Completion, Sample

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY = {
    **SHAPE,
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MIXTURE = {  # Qwen3-30B-A3B with 12 of its 48 layers
    **SHAPE,
    **EXPERTS,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TINY_MIXTURE = {**TINY, **EXPERTS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model_of(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Random weights, made where they are used."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            mixture = "num_experts" in shape
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)) if mixture else Qwen3ForCausalLM(Qwen3Config(**shape))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def batch_of(arguments: argparse.Namespace, vocabulary: int) -> Batch:
    """Trajectories whose lengths have a long tail; their log-probabilities are near those of random weights."""
    draw = np.random.default_rng(arguments.seed)
    count = arguments.groups * arguments.members
    lengths = np.exp(draw.normal(np.log(arguments.median), arguments.sigma, count))
    samples = []
    for index, length in enumerate(np.clip(lengths, 1, arguments.cap).astype(int).tolist()):
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        logprobs, routing = np.full(length, -np.log(vocabulary), np.float32), record_of(arguments, length, draw)
        completion = Completion(index, 0, tokens, logprobs, "stop", "", routing=routing)
        prompt = tuple(draw.integers(0, vocabulary, arguments.prompt).tolist())
        samples.append(Sample(index, index // arguments.members, 0, prompt, completion, float(draw.integers(0, 2))))
    return Batch(0, samples)


def record_of(arguments: argparse.Namespace, length: int, draw: np.random.Generator) -> np.ndarray | None:
    """Experts at random, which is a balanced load; None for a dense model."""
    shape = arguments.shape
    if "num_experts" not in shape:
        return None
    tokens, chosen = arguments.prompt + length - 1, shape["num_experts_per_tok"]
    first = draw.integers(0, shape["num_experts"], (tokens, shape["num_hidden_layers"], 1))
    return ((first + np.arange(chosen)) % shape["num_experts"]).astype(np.uint8)


def measure(setting: dict[str, Any], arguments: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """One setting: seconds of the measured updates, tokens a second, utilization, memory."""
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer = LocalTrainer(
        model_of(arguments.shape, arguments.device, getattr(torch, arguments.dtype)),
        lora=LoraOptions(rank=arguments.rank) if setting["kind"] == "lora" else None,
        options=TrainingOptions(
            micro_tokens=setting["micro_tokens"], compile=setting["compile"], checkpointing=setting["checkpointing"]
        ),
    )
    for _ in range(arguments.warmup):
        trainer.update(Batch(trainer.version, batch.samples))
    warm = time.perf_counter() - started
    reports = [trainer.update(Batch(trainer.version, batch.samples)) for _ in range(arguments.repeats)]
    seconds = statistics.median(report.seconds for report in reports)
    tokens = sum(len(s.prompt) + len(s.completion.tokens) - 1 for s in batch.samples)
    metrics = reports[-1].metrics
    if arguments.profile and cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            trainer.update(Batch(trainer.version, batch.samples))
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))
    started = time.perf_counter()
    trainer.weights(trainer.version)
    return {
        "seconds": seconds,
        "all_seconds": [report.seconds for report in reports],
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tflops_per_second": metrics["flops"] / seconds / 1e12,
        "mfu": None if trainer.peak is None else metrics["flops"] / seconds / trainer.peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "micro_batches": metrics["micro_batches"],
        "warmup_s": warm,
        **({"loss_scale": metrics["loss_scale"]} if "loss_scale" in metrics else {}),
        "weights_s": time.perf_counter() - started,
    }


def settings_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("kind", "compile", "checkpointing", "micro_tokens")
    choices = (arguments.kinds, arguments.compile, arguments.checkpointing, arguments.micro_tokens)
    return [
        {**dict(zip(names, values, strict=True)), **arguments.other_dtype} for values in itertools.product(*choices)
    ]


def parse() -> argparse.Namespace:
    def switch(text: str) -> bool:
        if text not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither `on` nor `off`")
        return text == "on"

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the processor")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="of the weights; default: bfloat16, tiny: float32"
    )
    parser.add_argument("--kinds", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--compile", nargs="+", type=switch, default=[True, False], metavar="on|off")
    parser.add_argument("--checkpointing", nargs="+", type=switch, default=[False], metavar="on|off")
    parser.add_argument("--micro-tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--median", type=float, default=600)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--cap", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixture", action="store_true", help="Qwen3-30B-A3B with 12 layers, its routing replayed")
    parser.add_argument("--layers", type=int, help="fewer layers: all parameters of 12 do not fit on one device")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more update by their time")
    arguments = parser.parse_args()
    arguments.device, arguments.shape = "cuda", MIXTURE if arguments.mixture else SHAPE
    if arguments.layers:
        arguments.shape = {**arguments.shape, "num_hidden_layers": arguments.layers}
    if arguments.mixture:
        arguments.compile = [None]  # as by default: its attention is compiled
    usual = "float32" if arguments.tiny else "bfloat16"
    arguments.other_dtype = {} if arguments.dtype in (None, usual) else {"dtype": arguments.dtype}
    arguments.dtype = arguments.dtype or usual
    if arguments.tiny:
        arguments.device, arguments.shape = "cpu", TINY_MIXTURE if arguments.mixture else TINY
        arguments.groups, arguments.members, arguments.prompt, arguments.median, arguments.cap = 2, 2, 5, 12, 40
        arguments.compile = [None] if arguments.mixture else [False]
        arguments.micro_tokens, arguments.repeats = [64, 256], 1
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device: use `--tiny` to try the command on the processor")
    return arguments


def keep(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Writes what there is after each setting, so that a run that is cut short leaves it, and frees the device."""
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    gc.collect()
    torch._dynamo.reset()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    arguments = parse()
    batch = batch_of(arguments, arguments.shape["vocab_size"])
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    results: dict[str, Any] = {"torch": torch.__version__, "device": device, "settings": []}
    for setting in settings_of(arguments):
        name = ", ".join(f"{key} {value}" for key, value in setting.items())
        try:
            measured = measure(setting, arguments, batch)
        except torch.OutOfMemoryError as error:
            measured = {"out_of_memory": str(error).splitlines()[0]}
            print(f"{name:75} out of memory", flush=True)
        else:
            mfu = "" if measured["mfu"] is None else f", mfu {100 * measured['mfu']:.1f} %"
            memory = "" if measured["peak_gib"] is None else f", {measured['peak_gib']:.1f} GiB"
            rate, first = measured["tokens_per_second"], measured["warmup_s"]
            print(
                f"{name:75} {measured['seconds']:7.3f} s, {rate:9,.0f} tokens/s{mfu}{memory} (first {first:.1f} s)",
                flush=True,
            )
        results["settings"].append({**setting, **measured})
        keep(results, arguments)


if __name__ == "__main__":
    main()
