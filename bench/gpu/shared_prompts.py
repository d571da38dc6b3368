"""How much time an update saves by computing each prompt once for all of its answers.

    python -m bench.gpu.shared_prompts --model models/qwen2.5-coder-1.5b --prompts 0,512,2048 --out RESULTS

Both sides are one trainer (LoRA, default settings) with the same batch: groups of answers of random tokens, as long as
those to GSM8K (300 on average, 512 at most), with a reward of 0 or 1, so that every sequence has a gradient.
`--prompts` are the tokens of a prompt; 0 stands for the real prompts of GSM8K. The sides take turns, and the learning
rate is so small that the policy stays as it is. `speedup` is the median time without sharing over that with it.
`grad_norm_difference` and `logprob_difference` are what rounding makes of it: the relative difference of the norms of
both gradients, and the mean difference of a log-probability.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.answers import prompts_of
from bench.gpu.cells import Cell, add_options, from_options, integers
from bench.gpu.problems import read_problems, write_tiny_model, write_tiny_problems
from stretto.models.loading import load_model, load_tokenizer
from stretto.training.forward import PackedModel
from stretto.training.recorded_logprobs import rescore
from stretto.training.sequence_sizes import SequenceSizes
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Completion, Sample

RANK, RATE = 32, 1e-12
MEAN, SPREAD, MOST = 300, 110, 512  # tokens of an answer
SCORED = 64  # samples whose log-probabilities are compared
SHARED, REPEATED = "shared", "repeated"


def batch_of(prompts: list[tuple[int, ...]], group: int, vocabulary: int, most: int) -> list[Sample]:
    """Answers of random tokens to each prompt; half of a group's are right."""
    draw = np.random.default_rng(0)
    samples: list[Sample] = []
    for place, prompt in enumerate(prompts):
        for member in range(group):
            length = int(np.clip(draw.normal(MEAN, SPREAD), 1, most))
            tokens = draw.integers(0, vocabulary, length).astype(np.int32)
            made = Completion(len(samples), 0, tokens, np.full(length, -12.0, np.float32), "stop", "")
            samples.append(Sample(len(samples), place, 0, prompt, made, float(member % 2)))
    return samples


def sharing(side: str) -> Any:
    """A context in which prompts are shared, or not."""
    return mock.patch.object(PackedModel, "shares_prompts", side == SHARED)


def measure(trainer: LocalTrainer, samples: list[Sample], options: argparse.Namespace) -> dict[str, Any]:
    """Updates of both sides in turns, after one of each that does not count."""
    seconds: dict[str, list[float]] = {SHARED: [], REPEATED: []}
    norms, micro_batches = dict[str, float](), dict[str, float]()
    for turn in range(options.repeats + 1):
        for side, found in seconds.items():
            with sharing(side):
                report = trainer.update(Batch(trainer.version, samples))
            norms[side], micro_batches[side] = report.metrics["grad_norm"], report.metrics["micro_batches"]
            if turn:
                found.append(report.seconds)
    scored = {}
    for side in seconds:
        with sharing(side):
            scored[side] = np.concatenate(rescore(trainer, samples[:SCORED]))
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    sizes = SequenceSizes.of(samples, shares_prompts=True)
    return {
        "speedup": medians[REPEATED] / medians[SHARED],
        "fewer_tokens": 1 - sizes.total / float(sizes.alone.sum()),
        **{f"{side}_s": value for side, value in medians.items()},
        **{f"{side}_all_s": found for side, found in seconds.items()},
        **{f"{side}_micro_batches": value for side, value in micro_batches.items()},
        "tokens": {SHARED: sizes.total, REPEATED: int(sizes.alone.sum())},
        "grad_norm_difference": norms[SHARED] / norms[REPEATED] - 1,
        "logprob_difference": float(np.abs(scored[SHARED] - scored[REPEATED]).mean()),
    }


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--model", default="models/qwen2.5-coder-1.5b", help="a folder, or a hub name")
    parser.add_argument("--problems", type=Path, default=Path("data/gsm8k"), help="what `examples/gsm8k.py` made")
    parser.add_argument("--prompts", type=integers, default=[0, 512, 2048], help="tokens of a prompt; 0: GSM8K's own")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=4)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            options.model = str(write_tiny_model(Path(scratch) / "tiny"))
            options.problems, options.device = write_tiny_problems(Path(scratch) / "problems"), "cpu"
            options.groups, options.group, options.prompts, options.repeats = 2, 3, [0, 40], 1
        dtype = torch.bfloat16  # the type in which the trainer's own decoder runs, also on a CPU
        model: Any = load_model(options.model, dtype, torch.device(options.device))
        tokenizer = load_tokenizer(options.model)
        vocabulary = model.get_input_embeddings().num_embeddings
        trainer = LocalTrainer(
            model,
            lora=LoraOptions(rank=RANK),
            options=TrainingOptions(micro_tokens=options.micro_tokens, learning_rate=RATE),
        )
        for length in options.prompts:
            if length:
                draw = np.random.default_rng(length)
                prompts = [tuple(draw.integers(0, vocabulary, length).tolist()) for _ in range(options.groups)]
            else:
                prompts = prompts_of(tokenizer, read_problems(options.problems, "train", options.groups))
            samples = batch_of(prompts, options.group, vocabulary, 20 if options.tiny else MOST)
            parameters = {"model": Path(options.model).name, "prompt": length, "groups": options.groups}
            cells.measure(
                Cell("shared-prompts", "native", parameters),
                lambda: measure(trainer, samples, options),  # noqa: B023 - called at once
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
