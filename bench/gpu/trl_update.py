"""Update, TRL's side: `GRPOTrainer` with vLLM colocated, LoRA rank 16, lengths made by stop tokens on random weights.

    python -m bench.gpu.trl_update --groups 64 --updates 3 --out RESULTS --resume

The same shape, prompts' length, stop tokens, longest completion and number of completions as
`bench.gpu.update --tail stop-tokens`; neither side is changed for the other. TRL wants a model folder with weights and
a tokenizer, so one is made with a word for every token. The first update is a warm-up and does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.gpu.cells import Cell, add_options, from_options
from bench.gpu.runs import SyntheticPrompts
from bench.gpu.shapes import RANK, SCALE, SHAPES, make_model
from bench.gpu.update import GROUP, NUM_STOP_TOKENS, STOP_MAX_TOKENS, stop_tokens


def word_tokenizer(size: str, end: int) -> Any:
    """A tokenizer in which the word `w17` is token 17 and `end` ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(SHAPES[size].vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    padding = (end + 1) % len(words)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", eos_token=f"w{end}", pad_token=f"w{padding}", padding_side="left"
    )


def model_folder(folder: Path, size: str, device: str, ends: Sequence[int]) -> Path:
    """Random weights, the same as `bench.gpu.update` makes on this device, with a tokenizer beside them."""
    make_model(size, device).save_pretrained(folder)
    word_tokenizer(size, ends[0]).save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


class Clock:
    """Marks of the host's clock at the beginning of an update, when its rewards are asked for, and at its end."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.scored: list[float] = []
        self.ended: list[float] = []
        self.tokens: list[int] = []
        self.longest: list[int] = []

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def reward(self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """A coin for every completion; its length is taken down."""
        self.scored.append(self.now())
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        self.longest.append(max(len(ids) for ids in completion_ids))
        return np.random.default_rng(len(self.scored)).integers(0, 2, len(completions)).astype(float).tolist()

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Marks(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *arguments: Any, **options: Any) -> None:
                clock.began.append(clock.now())

            def on_step_end(self, *arguments: Any, **options: Any) -> None:
                clock.ended.append(clock.now())

        return Marks()

    def results(self) -> dict[str, Any]:
        """Over all updates but the first, from the end of one to the end of the next."""
        updates = len(self.ended) - 1
        wall = self.ended[-1] - self.ended[0]
        if not len(self.scored) == len(self.tokens) == updates + 1:
            raise RuntimeError(f"rewards were asked for {len(self.scored)} times in {updates + 1} updates")
        rollout = sum(s - b for s, b in zip(self.scored[1:], self.began[1:], strict=True))
        training = sum(e - s for e, s in zip(self.ended[1:], self.scored[1:], strict=True))
        return {
            "tokens_per_s": sum(self.tokens[1:]) / wall,
            "seconds_per_update": wall / updates,
            "rollout_and_scoring_s_per_update": rollout / updates,
            "training_s_per_update": training / updates,
            "first_update_s": self.ended[0] - self.began[0],
            "tokens": sum(self.tokens[1:]),
            "wall_s": wall,
            "longest": max(self.longest),
        }


def grpo_options(options: argparse.Namespace, folder: Path, ends: Sequence[int]) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: one optimizer step an update, everything else as TRL has it."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.groups * GROUP // options.micro_batch,
        "num_generations": GROUP,
        "max_completion_length": STOP_MAX_TOKENS,
        "temperature": 1.0,
        "learning_rate": 1e-5,
        "max_steps": 1 + options.updates,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.vllm_memory,
        "vllm_max_model_length": options.prompt + STOP_MAX_TOKENS + 16,
        "generation_kwargs": {"stop_token_ids": list(ends)},
        "model_init_kwargs": {"dtype": "bfloat16"},
        "gradient_checkpointing": options.checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    ends = stop_tokens(options.size, options.stop_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = model_folder(folder / "model", options.size, options.device, ends)
        wanted = grpo_options(options, folder, ends)
        unknown = set(wanted) - {field.name for field in dataclasses.fields(GRPOConfig)}
        if unknown:
            raise RuntimeError(
                f"this TRL's `GRPOConfig` does not know {sorted(unknown)}; the bench was written for 1.16"
            )
        stream = SyntheticPrompts(options.size, options.prompt, seed=0)
        rows = [
            {"prompt": " ".join(f"w{token}" for token in stream.prompt(index).tokens)}
            for index in range(options.groups * (1 + options.updates))
        ]
        clock = Clock()
        trainer = GRPOTrainer(
            model=str(path),
            reward_funcs=clock.reward,
            args=GRPOConfig(**wanted),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=int(SCALE * RANK), target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[clock.callback()],
        )
        trainer.train()
    return {**clock.results(), "config": {name: value for name, value in wanted.items() if name != "generation_kwargs"}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2, help="that count, after one that does not")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--stop-tokens", type=int, default=NUM_STOP_TOKENS)
    parser.add_argument("--micro-batch", type=int, default=8, help="`per_device_train_batch_size`")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="`vllm_gpu_memory_utilization`")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    cells = from_options(options)
    parameters = {"size": options.size, "tail": "stop-tokens", "groups": options.groups, "prompt": options.prompt}
    extra = {"micro": options.micro_batch, "checkpointing": int(options.checkpointing), "updates": options.updates}
    cells.measure(Cell("update", "trl", {**parameters, **extra}), lambda: measure(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
