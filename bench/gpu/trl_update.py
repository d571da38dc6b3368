"""Update, TRL's side: `GRPOTrainer` with vLLM colocated, LoRA rank 16, lengths made by stop tokens on random weights.

    python -m bench.gpu.trl_update --groups 64 --updates 3 --out RESULTS --resume
    python -m bench.gpu.trl_update --groups 64 --updates 1 --sweep 8:on,16:on,8:off --sweep-groups 8 --out RESULTS

The same shape, prompts' length, stop tokens, longest completion and number of completions as
`bench.gpu.update --tail stop-tokens`; neither side is changed for the other. TRL wants a model folder with weights and
a tokenizer, so one is made with a word for every token. The first update is a warm-up and does not count.

`--sweep` tries sizes of the micro-batch, each with gradient checkpointing on or off, on `--sweep-groups` groups first,
every one a cell of its own, and measures `--groups` with the fastest of them, in the same process: vLLM is started once
for all of them, and after a sweep that was measured here, and not found, no further warm-up is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell, add_options, from_options, read_cells
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

    def results(self, warm_up: int = 1) -> dict[str, Any]:
        """Over all updates but the first `warm_up`, from the end of one to the end of the next."""
        updates = len(self.ended) - warm_up
        wall = self.ended[-1] - (self.ended[warm_up - 1] if warm_up else self.began[0])
        if not len(self.scored) == len(self.tokens) == len(self.ended):
            raise RuntimeError(f"rewards were asked for {len(self.scored)} times in {len(self.ended)} updates")
        marks = zip(self.began[warm_up:], self.scored[warm_up:], self.ended[warm_up:], strict=True)
        spans = [(scored - began, ended - scored) for began, scored, ended in marks]
        rollout, training = (sum(part) for part in zip(*spans, strict=True))
        return {
            "tokens_per_s": sum(self.tokens[warm_up:]) / wall,
            "seconds_per_update": wall / updates,
            "rollout_and_scoring_s_per_update": rollout / updates,
            "training_s_per_update": training / updates,
            "first_update_s": self.ended[0] - self.began[0],
            "tokens": sum(self.tokens[warm_up:]),
            "wall_s": wall,
            "longest": max(self.longest),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is tuned."""

    micro: int  # `per_device_train_batch_size`
    checkpointing: bool

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `8:on` or `8:off`."""
        micro, _, switch = text.partition(":")
        if not micro.isdigit() or int(micro) < 1 or switch not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"`{text}` is no setting: it is a micro-batch and a switch, as in `8:on`")
        return cls(int(micro), switch == "on")


def settings(text: str) -> list[Setting]:
    return [Setting.parse(part) for part in text.split(",")]


def grpo_options(
    options: argparse.Namespace, setting: Setting, groups: int, updates: int, folder: Path
) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: one optimizer step an update, everything else as TRL has it."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": setting.micro,
        "gradient_accumulation_steps": groups * GROUP // setting.micro,
        "num_generations": GROUP,
        "max_completion_length": STOP_MAX_TOKENS,
        "temperature": 1.0,
        "learning_rate": 1e-5,
        "max_steps": updates,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.vllm_memory,
        "vllm_max_model_length": options.prompt + STOP_MAX_TOKENS + 16,
        "generation_kwargs": {"stop_token_ids": list(stop_tokens(options.size, options.stop_tokens))},
        "model_init_kwargs": {"dtype": "bfloat16"},
        "gradient_checkpointing": setting.checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }


def start_vllm_once(most_rows: int) -> None:
    """Have every trainer of this process given the same vLLM, which can run as many rows as the largest needs."""
    from trl.generation import vllm_generation

    make, made = vllm_generation.LLM, list[Any]()

    def vllm(**wanted: Any) -> Any:
        if not made:
            made.append(make(**{**wanted, "max_num_seqs": most_rows}))
        return made[0]

    vllm_generation.LLM = vllm


def measure(
    options: argparse.Namespace, setting: Setting, groups: int, folder: Path, warm_up: int = 1
) -> dict[str, Any]:
    """Updates of `groups` groups, after `warm_up` that do not count; `folder` holds the model."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # TRL sets them for vLLM; another trainer would take to DDP
        os.environ.pop(name, None)
    updates = warm_up + options.updates
    wanted = grpo_options(options, setting, groups, updates, folder)
    if unknown := set(wanted) - {field.name for field in dataclasses.fields(GRPOConfig)}:
        raise RuntimeError(f"this TRL's `GRPOConfig` does not know {sorted(unknown)}; the bench was written for 1.16")
    stream = SyntheticPrompts(options.size, options.prompt, seed=0)
    rows = [
        {"prompt": " ".join(f"w{token}" for token in stream.prompt(index).tokens)} for index in range(groups * updates)
    ]
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=clock.reward,
        args=GRPOConfig(**wanted),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=int(SCALE * RANK), target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[clock.callback()],
    )
    try:
        trainer.train()
    finally:
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    config = {name: value for name, value in wanted.items() if name not in ("generation_kwargs", "output_dir")}
    return {**clock.results(warm_up), "config": config}


def run(options: argparse.Namespace) -> None:
    """The sweep, where there is one, and then the measurement with the fastest setting of it."""
    cells = from_options(options)

    def cell_of(setting: Setting, groups: int) -> Cell:
        parameters = {"size": options.size, "tail": "stop-tokens", "groups": groups, "prompt": options.prompt}
        extra = {"micro": setting.micro, "checkpointing": int(setting.checkpointing), "updates": options.updates}
        return Cell("update", "trl", {**parameters, **extra})

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.folder is None else options.folder
        if not (folder / "model" / "config.json").exists():
            model_folder(folder / "model", options.size, options.device, stop_tokens(options.size, options.stop_tokens))
        start_vllm_once(GROUP * max(options.groups, options.sweep_groups))
        best, warm_up = Setting(options.micro_batch, options.checkpointing), 1
        if options.sweep:
            tried = {setting: cell_of(setting, options.sweep_groups) for setting in options.sweep}
            for setting, cell in tried.items():
                made = cells.measure(cell, functools.partial(measure, options, setting, options.sweep_groups, folder))
                if made is not None and "does_not_fit" not in made["results"]:
                    warm_up = 0  # that was one
            best = fastest(tried, read_cells([*options.known, options.out]))
            print(
                f"fastest: micro-batch {best.micro}, checkpointing {'on' if best.checkpointing else 'off'}", flush=True
            )
        cells.measure(cell_of(best, options.groups), lambda: measure(options, best, options.groups, folder, warm_up))


def fastest(tried: Mapping[Setting, Cell], records: Sequence[Mapping[str, Any]]) -> Setting:
    """The setting with the highest rate; one that did not fit has none."""
    rates = {
        setting: record["results"].get("tokens_per_s", 0.0)
        for setting, cell in tried.items()
        for record in records
        if Cell(record["bench"], record["side"], record["parameters"]).name == cell.name
    }
    best = max(rates, key=lambda setting: rates[setting])
    if not rates[best]:
        raise RuntimeError("no setting of the sweep fits into memory: give it smaller micro-batches")
    return best


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
    parser.add_argument("--sweep", type=settings, help="settings to try first, as in `8:on,16:on,8:off`")
    parser.add_argument("--sweep-groups", type=int, default=8, help="groups that they are tried on")
    parser.add_argument("--folder", type=Path, help="keep the model there; vLLM finds what it compiled for it again")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
