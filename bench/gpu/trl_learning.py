"""Learning, TRL's side: `GRPOTrainer` with vLLM colocated on the problems of `bench.gpu.learning`.

    python -m bench.gpu.trl_learning --model models/smollm2-135m --problems PROBLEMS --seeds 0,1 --out RESULTS --resume

The same model, problems, reward, LoRA, learning rate, completions an update and temperature as the native runs; what
else there is to choose is as TRL has it. Its vLLM answers the held-out problems every few updates, which is not counted
in `elapsed_s`. A run a process, because TRL leaves vLLM in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cells import Cell, add_options, from_options, integers, run_children
from stretto.environments.reasoning_problems import exact

RANK = 16
MARGIN = 64  # tokens of context beyond the longest prompt and completion


def read_problems(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The reward of every text."""
    return [exact("", text, answer=answer) for text, answer in zip(texts, answers, strict=True)]


class Curve:
    """Asks TRL's own vLLM for the held-out problems, and takes down what it answers and when."""

    def __init__(self, held_out: Sequence[Mapping[str, Any]], every: int, max_tokens: int) -> None:
        self.held_out, self.every, self.max_tokens = held_out, every, max_tokens
        self.points: list[dict[str, Any]] = []
        self.training_s = 0.0
        self._since = time.perf_counter()

    def evaluate(self, trainer: Any, version: int) -> None:
        """One point of the curve; the clock of training stands still meanwhile."""
        from vllm import SamplingParams

        self.training_s += time.perf_counter() - self._since
        trainer.vllm_generation.sync_weights()
        tokenizer = trainer.processing_class
        prompts = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            for row in self.held_out
        ]
        answered = trainer.vllm_generation.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=1.0, max_tokens=self.max_tokens),
            use_tqdm=False,
        )
        texts = [tokenizer.decode(each.outputs[0].token_ids, skip_special_tokens=True) for each in answered]
        scores = score(texts, [row["answer"] for row in self.held_out])
        tokens = sum(len(each.outputs[0].token_ids) for each in answered)
        point = {"version": version, "score": sum(scores) / len(scores), "num_scored": len(scores)}
        self.points.append({**point, "mean_tokens": tokens / len(scores), "elapsed_s": self.training_s})
        print(f"version {version}: {point['score']:.3f} after {self.training_s:.1f} s", flush=True)
        self._since = time.perf_counter()

    def callback(self, trainers: list[Any]) -> Any:
        """`trainers` is filled with the trainer once that is made."""
        from transformers import TrainerCallback

        curve = self

        class Asks(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *arguments: Any, **options: Any) -> None:
                curve._since = time.perf_counter()
                curve.evaluate(trainers[0], 0)

            def on_step_end(self, arguments: Any, state: Any, control: Any, **options: Any) -> None:
                if state.global_step % curve.every == 0 or state.global_step == state.max_steps:
                    curve.evaluate(trainers[0], state.global_step)

        return Asks()


def measure(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    train = read_problems(options.problems / "train.jsonl")
    random.Random(seed).shuffle(train)
    needed = options.prompts * options.updates
    rows = [{"prompt": row["messages"], "answer": row["answer"]} for row in (train * (1 + needed // len(train)))]
    curve = Curve(
        read_problems(options.problems / "held_out.jsonl")[: options.held_out], options.every, options.max_tokens
    )

    def reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        return score([completion[0]["content"] for completion in completions], answer)

    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "output_dir": folder,
            "seed": seed,
            "per_device_train_batch_size": options.micro_batch,
            "gradient_accumulation_steps": options.prompts * options.group // options.micro_batch,
            "num_generations": options.group,
            "max_completion_length": options.max_tokens,
            "temperature": 1.0,
            "learning_rate": options.learning_rate,
            "lr_scheduler_type": "constant",
            "max_steps": options.updates,
            "bf16": True,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.vllm_memory,
            "vllm_max_model_length": 256 + options.max_tokens + MARGIN,
            "model_init_kwargs": {"dtype": "bfloat16"},
            "logging_steps": options.every,
            "save_strategy": "no",
            "report_to": [],
        }
        trainers: list[Any] = []
        trainers.append(
            GRPOTrainer(
                model=options.model,
                reward_funcs=reward,
                args=GRPOConfig(**wanted),
                train_dataset=Dataset.from_list(rows[:needed]),
                peft_config=LoraConfig(
                    r=RANK, lora_alpha=options.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
                ),
                callbacks=[curve.callback(trainers)],
            )
        )
        trainers[0].train()
    scores = [point["score"] for point in curve.points]
    config = {name: value for name, value in wanted.items() if name != "output_dir"}
    return {
        "eval_before": scores[0],
        "eval_after": scores[-1],
        "eval_best": max(scores),
        "wall_s": curve.training_s,
        "evaluations": curve.points,
        "config": config,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--problems", type=Path, required=True, help="folder that `bench.gpu.learning` wrote")
    parser.add_argument("--seeds", type=integers, default=[0, 1])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lora-alpha", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="updates between evaluations")
    parser.add_argument("--held-out", type=int, default=256, help="prompts of an evaluation")
    parser.add_argument("--micro-batch", type=int, default=64, help="`per_device_train_batch_size`")
    parser.add_argument("--vllm-memory", type=float, default=0.1, help="`vllm_gpu_memory_utilization`")
    options = parser.parse_args(given)
    cells = from_options(options)
    if len(options.seeds) == 1:
        (seed,) = options.seeds
        parameters = {"paradigm": "synchronous", "staleness": 0, "seed": seed, "updates": options.updates}
        cells.measure(Cell("learning", "trl", parameters), lambda: measure(seed, options))
        return 0
    own = ["--sitting", cells.sitting]
    return run_children(
        [[sys.executable, "-m", "bench.gpu.trl_learning", *given, "--seeds", str(s), *own] for s in options.seeds]
    )


if __name__ == "__main__":
    raise SystemExit(main())
