"""How long a model's answers to some problems are, and how many are right, before any training.

    python -m bench.gpu.answers --model MODEL --problems data/gsm8k,data/count_primes --max-tokens 4096 --out RESULTS

One cell a folder of problems, which has `train.jsonl` and `test.jsonl` as `examples/gsm8k.py` and
`examples/reasoning_problems.py` write them. The first `--count` held-out problems of every folder are answered at
temperature 1 by the native engine, all in one batch. The cells tell which task has a long tail and leaves something to
learn, before a run is made with it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell, add_options, from_options, words
from bench.gpu.problems import Problem, load_reward, read_problems, score, write_tiny_model, write_tiny_problems
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import Failed
from stretto.errors import ModelError
from stretto.models.checksums import checksum
from stretto.models.loading import load_model, load_tokenizer
from stretto.models.lora import adapted_modules
from stretto.types import Completion, Request, Sampling, Weights

REWARD = "stretto.environments.rewards.mathematics:reward"
ROWS = 1_024  # that decode at once
MARGIN = 32  # tokens of context beyond the longest prompt and completion
RANK = 1
SHARES = (50, 90, 99)  # percentiles that are reported


def prompts_of(tokenizer: Any, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """The prompts of problems, by the chat template."""
    return [
        tuple(tokenizer.apply_chat_template(list(each["messages"]), add_generation_prompt=True, return_dict=False))
        for each in problems
    ]


def stop_tokens(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by the tokenizer and by the model."""
    ends = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return tuple(sorted(token for token in found if token is not None))


def answer_all(engine: NativeEngine, requests: Sequence[Request]) -> tuple[dict[int, Completion], float]:
    """The completions by id, and the seconds that they took."""
    for each in requests:
        engine.add(each)
    began, done = time.perf_counter(), dict[int, Completion]()
    while engine.has_work:
        for one in engine.step():
            if isinstance(one, Failed):
                raise one.error
            done[one.id] = one
    return done, time.perf_counter() - began


def no_change(model: torch.nn.Module) -> Weights:
    """Version 0: an adapter that changes nothing."""
    tensors = {}
    for name, module in adapted_modules(model).items():
        weight = module.weight
        tensors[f"{name}.lora_A"] = weight.new_zeros(RANK, weight.shape[1])
        tensors[f"{name}.lora_B"] = weight.new_zeros(weight.shape[0], RANK)
    return Weights(0, "lora", tensors, checksum(tensors, 1.0), 1.0)


class Answerer:
    """A model on a device that answers problems."""

    def __init__(self, options: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        self._options = options
        self._tokenizer = load_tokenizer(options.model, option="--model")
        self._model = load_model(options.model, dtype, torch.device(options.device), option="--model")

    def measure(self, problems: Sequence[Sequence[Problem]]) -> list[dict[str, Any]]:
        """Returns what the answers to the problems of each folder came to."""
        options = self._options
        prompts = [prompts_of(self._tokenizer, each) for each in problems]
        every = [prompt for each in prompts for prompt in each]
        context = max(map(len, every)) + options.max_tokens + MARGIN
        rows = min(ROWS, len(every))
        engine = NativeEngine(
            self._model,
            kind="lora",
            slots=1,
            rows=rows,
            kv_tokens=rows * context,
            max_context=context,
            lora_rank=RANK,
            prefill_tokens=8_192,
        )
        engine.load(no_change(self._model))
        sampling = Sampling(options.max_tokens, stop_tokens=stop_tokens(self._tokenizer, self._model))
        done, seconds = answer_all(engine, [Request(n, 0, prompt, n, sampling) for n, prompt in enumerate(every)])
        engine.close()
        left = iter(done[number].tokens.tolist() for number in range(len(every)))
        return [{**self._told(each, [next(left) for _ in each]), "seconds_of_all": seconds} for each in problems]

    def _told(self, problems: Sequence[Problem], answers: Sequence[list[int]]) -> dict[str, Any]:
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
        lengths = np.array([len(tokens) for tokens in answers])
        scored = score(load_reward(self._options.reward), problems, texts, lengths.tolist(), self._options.max_tokens)
        told = {f"length_p{share}": float(np.percentile(lengths, share)) for share in SHARES}
        return {**scored.as_json(), **told, "length_max": int(lengths.max())}


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--model", help="a folder, or a hub name; `--tiny` makes its own")
    parser.add_argument("--problems", type=words, default=["data/gsm8k"], help="folders, separated by commas")
    parser.add_argument("--count", type=int, default=256, help="held-out problems of each folder")
    parser.add_argument("--max-tokens", type=int, default=4_096)
    parser.add_argument("--reward", default=REWARD)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of()
    options = parser.parse_args(arguments)
    if options.model is None and not options.tiny:
        parser.error("`--model` is missing: give a folder, or a hub name")
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            options.model = str(write_tiny_model(Path(scratch) / "tiny"))
            options.problems = [str(write_tiny_problems(Path(scratch) / "problems"))]
            options.count, options.max_tokens, options.device = 4, 12, "cpu"
        shared = {"model": Path(options.model).name, "max_tokens": options.max_tokens, "count": options.count}
        asked = {Cell("answers", "native", {**shared, "problems": Path(each).name}): each for each in options.problems}
        if pending := cells.pending(list(asked)):
            try:
                problems = [read_problems(Path(asked[cell]), "test", options.count) for cell in pending]
                answerer = Answerer(options)
            except (ValueError, ModelError) as error:
                parser.error(str(error))
            found = answerer.measure(problems)
            for cell, results in zip(pending, found, strict=True):
                cells.write(cell, results)
                print(f"{cell.parameters['problems']}: {results}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
