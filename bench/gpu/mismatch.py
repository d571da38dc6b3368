"""Mismatch: the log-probabilities of an engine against the trainer's, on the tokens that the engine drew.

    python -m bench.gpu.mismatch --out RESULTS --resume
    python -m bench.gpu.mismatch --model models/smollm2-135m --out RESULTS --resume
    python -m bench.gpu.mismatch --model models/smollm2-135m --dtype float16 --out RESULTS --resume

Completions of `--prompts` prompts, `--tokens` tokens each, temperature 1, in the type of the weights: `--dtype`, by
default bfloat16 on a GPU. Without `--model` the weights are random, in the shape of `--size`, with random prompts; with
it, those of a folder, with prompts of text. Three cells: ours with full weights, ours with a random adapter on them,
and vLLM's, given the very same weights from a folder. The trainer is always ours, and what it computes is taken from
one real update.

`d` is trainer minus engine, of one token. `kl` is the mean of `exp(d) - 1 - d`, as in every run's `mismatch_kl`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.cells import Cell, add_options, from_options, release_memory, run_children, words
from bench.gpu.native_side import lengths
from bench.gpu.shapes import RANK, adapter, add_dtype, base_weights, config_of, dtype_of, dtype_parameter, make_model
from bench.gpu.sides import Ask, prompts
from stretto.engines.native.engine import NativeEngine
from stretto.models.loading import load_model, load_tokenizer
from stretto.models.lora_options import LoraOptions
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, Completion, Request, Sample, Sampling

SIDES = ("native-full", "native-lora", "vllm")
GROUP = 8  # so that rewards have something to be relative to
MARGIN = 32
VLLM_KV_BYTES = 8 << 30  # plenty for these prompts, so that it can run beside other work
OPENINGS = ("The history of", "A short explanation of", "Question: what is important about", "Once, in a book about")
SUBJECTS = ("bread", "the moon", "prime numbers", "rivers", "clocks", "whales", "trade", "music")


def asked(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """The prompts, the same for every side."""
    if options.model is None:
        return prompts(options.prompts, options.prompt, options.size, seed=51)
    texts = [f"{opening} {subject}" for opening in OPENINGS for subject in SUBJECTS]
    if options.prompts > len(texts):
        raise ValueError(f"`--prompts {options.prompts}`: there are {len(texts)} prompts of text; ask for fewer")
    tokenizer = load_tokenizer(options.model)
    return [tuple(tokenizer(text)["input_ids"]) for text in texts[: options.prompts]]


def model_of(options: argparse.Namespace) -> Any:
    if options.model is None:
        return make_model(options.size, options.device, dtype=options.dtype)
    return load_model(options.model, dtype_of(options.device, options.dtype), torch.device(options.device))


def cell_of(side: str, options: argparse.Namespace) -> Cell:
    name = options.size if options.model is None else Path(options.model).name
    parameters = {"model": name, "prompts": options.prompts, "tokens": options.tokens, **dtype_parameter(options)}
    if options.routing != "auto":
        parameters["routing"] = options.routing
    engine, _, kind = side.partition("-")
    return Cell("mismatch", engine, {**parameters, "kind": kind or "full"})


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_native(model: Any, kind: str, options: argparse.Namespace) -> tuple[LocalTrainer, list[Completion]]:
    """Completions of the native engine, and a trainer that holds what they were drawn from."""
    given = asked(options)
    context = max(len(prompt) for prompt in given) + options.tokens + MARGIN
    weights = adapter(model, 0) if kind == "lora" else base_weights(model)
    engine = NativeEngine(
        model,
        kind="lora" if kind == "lora" else "full",
        slots=1,
        rows=len(given),
        kv_tokens=len(given) * context,
        max_context=context,
        lora_rank=RANK if kind == "lora" else None,
        prefill_tokens=options.prefill_tokens,
    )
    engine.load(weights)
    for id, prompt in enumerate(given):
        engine.add(Request(id, 0, prompt, id, Sampling(options.tokens)))
    done: list[Completion] = []
    while engine.has_work:
        ended = engine.step()
        lengths(ended)  # a failure ends the bench
        done += ended  # type: ignore[arg-type]
    engine.close()
    trainer = trainer_of(model, kind, options)
    if kind == "lora":
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                module, _, part = name.rpartition(".")
                getattr(trainer.model.get_submodule(module), part).copy_(tensor)
    return trainer, sorted(done, key=lambda completion: completion.id)


def draw_vllm(options: argparse.Namespace, scratch: Path) -> list[Completion]:
    """Completions of vLLM in a process of its own, which has ended when this returns."""
    folder, drawn = scratch / "model" if options.model is None else Path(options.model), scratch / "drawn.npz"
    if options.model is None:
        model = make_model(options.size, options.device, dtype=options.dtype)
        model.save_pretrained(folder)
        config_of(options.size).save_pretrained(folder)  # as the other benches give it to vLLM
        del model
        release_memory(options.device)
    command = [options.vllm_python, "-m", "bench.gpu.mismatch", *options.given]
    _run([*command, "--draw-vllm", str(drawn), "--folder", str(folder)])
    with np.load(drawn) as file:
        return [
            Completion(i, 0, tokens, logprobs, "length", "")
            for i, (tokens, logprobs) in enumerate(zip(file["tokens"], file["logprobs"], strict=True))
        ]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def write_drawn(options: argparse.Namespace) -> None:
    """In vLLM's process: draw and write tokens and log-probabilities, both [prompts, tokens]."""
    from bench.gpu.vllm_side import VllmSide

    asks = [Ask(prompt, options.tokens) for prompt in asked(options)]
    context = max(len(ask.prompt) for ask in asks) + options.tokens + MARGIN
    with tempfile.TemporaryDirectory() as scratch:
        side = VllmSide(
            options.size,
            lora=False,
            max_context=context,
            folder=Path(scratch),
            model_folder=options.folder,
            kv_bytes=VLLM_KV_BYTES,
            dtype=options.dtype,
        )
        drawn = side.completions(asks)
    np.savez(
        options.draw_vllm,
        tokens=np.array([tokens for tokens, _ in drawn], dtype=np.int32),
        logprobs=np.array([logprobs for _, logprobs in drawn], dtype=np.float32),
    )


# -- scoring -----------------------------------------------------------------------------------------------------------


def trainer_of(model: Any, kind: str, options: argparse.Namespace) -> LocalTrainer:
    settings = TrainingOptions(micro_tokens=options.micro_tokens, routing=options.routing)
    return LocalTrainer(model, lora=LoraOptions(rank=RANK) if kind == "lora" else None, options=settings)


def score(trainer: LocalTrainer, drawn: Sequence[Completion], options: argparse.Namespace) -> NDArray[np.float64]:
    """Trainer minus engine of every token, from one real update."""
    given = asked(options)
    samples = [
        Sample(i, i // GROUP, 0, prompt, completion, float(i % 2))
        for i, (prompt, completion) in enumerate(zip(given, drawn, strict=True))
    ]
    packed, found = trainer.packed, dict[tuple[int, ...], torch.Tensor]()
    own = packed.logprobs

    def logprobs(micro: Any, *arguments: Any, **named: Any) -> Any:
        result = own(micro, *arguments, **named)
        if torch.is_grad_enabled():  # else a pass that looks ahead; a step that is made again says the same
            found[tuple(micro.samples)] = result[0].detach() - micro.behaviour_logprobs
        return result

    packed.logprobs = logprobs  # type: ignore[method-assign]
    try:
        trainer.update(Batch(trainer.version, samples))
    finally:
        packed.logprobs = own  # type: ignore[method-assign]
    differences: NDArray[np.float64] = torch.cat(list(found.values())).double().cpu().numpy()
    if len(differences) != sum(len(completion.tokens) for completion in drawn):
        raise RuntimeError(f"{len(differences)} tokens were scored, and others were drawn")
    return differences


def results_of(differences: NDArray[np.float64]) -> dict[str, Any]:
    """What is published of the differences of all tokens."""
    absolute = np.abs(differences)
    return {
        "mean_abs": float(absolute.mean()),
        "max_abs": float(absolute.max()),
        "p99_abs": float(np.quantile(absolute, 0.99)),
        "mean": float(differences.mean()),
        "kl": float((np.expm1(differences) - differences).mean()),
        "tokens": len(differences),
    }


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    if side == "vllm":
        with tempfile.TemporaryDirectory() as scratch:
            drawn = draw_vllm(options, Path(scratch))
        trainer = trainer_of(model_of(options), "full", options)
    else:
        trainer, drawn = draw_native(model_of(options), side.removeprefix("native-"), options)
    mean = float(np.concatenate([completion.logprobs for completion in drawn]).mean())
    dtype = str(trainer.packed.head.weight.dtype).removeprefix("torch.")
    return {**results_of(score(trainer, drawn, options)), "logprob_mean": mean, "dtype": dtype}


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_dtype(parser)
    parser.add_argument("--sides", type=words, default=list(SIDES), help="of " + ", ".join(SIDES))
    parser.add_argument("--size", default="1.7B", help="shape of the random weights")
    parser.add_argument("--model", help="a folder of real weights; default: random ones")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    parser.add_argument("--routing", choices=["auto", "free"], default="auto", help="free: experts are not replayed")
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--draw-vllm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.given = list(given)
    if unknown := sorted(set(options.sides) - set(SIDES)):
        parser.error(f"`--sides {unknown[0]}` is not known; there are {', '.join(SIDES)}")
    if options.tiny:
        options.size, options.prompts, options.prompt, options.tokens = "tiny", 8, 8, 12
        options.prefill_tokens, options.micro_tokens = 64, 128
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if options.draw_vllm is not None:
        write_drawn(options)
        return 0
    cells = from_options(options)
    if len(options.sides) == 1:
        side = options.sides[0]
        cells.measure(cell_of(side, options), lambda: measure(side, options))
        return 0
    return run_children(
        [
            [sys.executable, "-m", "bench.gpu.mismatch", *given, "--sides", side, "--sitting", cells.sitting]
            for side in options.sides
            if not cells.has(cell_of(side, options))
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
