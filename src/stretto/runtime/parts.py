"""What a run is made of: its inputs, its engines, its trainer, and how many threads each may use.

Made before anything runs, so that bad input shows before anything is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from stretto.config import Recipe
from stretto.engines.native.engine import NativeEngine
from stretto.environments.single_turn import Decode
from stretto.models import load_config, load_model, load_tokenizer, second_tree
from stretto.observe.progress import Observer
from stretto.runtime.device import choose_device, choose_dtype
from stretto.runtime.inputs import Inputs, load_inputs
from stretto.runtime.memory import context_length, engine_rows, footprint, free_for_instance, out_of_memory
from stretto.tiny import WarmStart, tiny_model
from stretto.training.lora import LoraOptions
from stretto.training.optimizer import TrainerOptions
from stretto.training.parallel import Ranks
from stretto.training.trainer import LocalTrainer
from stretto.types import Sampling


@dataclass(slots=True)
class Desk:
    """What the loop needs wherever instances and trainer run. Read before anything runs, so that bad input shows."""

    inputs: Inputs
    decode: Decode
    sampling: Sampling
    threads: tuple[int, int]  # one instance, trainer
    vocabulary: int  # rows of the embedding: every token is below
    tokenizer: Any


@dataclass(slots=True)
class Parts(Desk):
    """What the loop joins in one process. Made before anything runs, so that bad input shows before anything is
    written."""

    cores: list[NativeEngine]  # the instances that the run begins with
    another: Callable[[], NativeEngine]  # makes one more while the run goes on
    trainer: LocalTrainer

    def take_core(self) -> NativeEngine:
        """The next instance: one of those that were made before the run, then new ones. For one thread at a time."""
        return self.cores.pop(0) if self.cores else self.another()

    @classmethod
    def build(cls, recipe: Recipe, model_path: str) -> Parts:
        config, device = load_config(model_path), choose_device(recipe.runtime.device)
        desk = read_desk(recipe, model_path)
        need = footprint(recipe, config, desk.inputs.longest_prompt, device)
        try:
            model = load_model(model_path, choose_dtype(recipe.model.dtype, device), device)
            torch.set_num_threads(desk.threads[0])  # the engine measures at its start how its thread count rounds
            # The engines' trees first: the trainer replaces linear layers in the one that was loaded.
            cores = [make_core(recipe, model, need.kv_tokens, desk.decode) for _ in range(recipe.runtime.instances)]
            base = None if recipe.model.lora is None else second_tree(model, share=True)
            trainer = make_trainer(recipe, model, model_path)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(recipe, need, error) from error

        def another() -> NativeEngine:
            again = base
            if again is None:  # weights that are being trained are no model to copy
                again = load_model(model_path, choose_dtype(recipe.model.dtype, device), device)
            return make_core(recipe, again, need.kv_tokens, desk.decode)

        return cls(
            desk.inputs, desk.decode, desk.sampling, desk.threads, desk.vocabulary, desk.tokenizer,
            cores, another, trainer,
        )  # fmt: skip


def read_desk(recipe: Recipe, model_path: str) -> Desk:
    """The inputs of a run, checked against the model's tokenizer and configuration; its weights are not read."""
    tokenizer, config = load_tokenizer(model_path), load_config(model_path)
    inputs = load_inputs(recipe, tokenizer, context=context_length(config), model_path=model_path)
    sampling = Sampling(
        max_tokens=recipe.rollout.max_tokens,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
        min_p=recipe.rollout.min_p,
        stop_tokens=_stop_tokens(model_path, config, tokenizer),
        stop_strings=recipe.rollout.stop,
    )
    vocabulary = int(config.get_text_config().vocab_size)
    return Desk(inputs, decoder_of(tokenizer), sampling, role_threads(recipe), vocabulary, tokenizer)


def decoder_of(tokenizer: Any) -> Decode:
    """Tokens to text, special tokens left out."""

    @lru_cache(maxsize=8)  # the journal and the environment ask for the same text, one right after the other
    def text_of(tokens: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode(tokens: Sequence[int]) -> str:
        return text_of(tuple(tokens))

    return decode


def make_core(recipe: Recipe, model: nn.Module, kv_tokens: int, decode: Decode) -> NativeEngine:
    """The core of one rollout instance over a model's base."""
    lora = recipe.model.lora
    return NativeEngine(
        model,
        kind="full" if lora is None else "lora",
        slots=recipe.num_slots,
        rows=engine_rows(recipe),
        kv_tokens=kv_tokens,
        max_context=context_length(model.config),
        lora_rank=None if lora is None else lora.rank,
        lora_targets=None if lora is None else lora.targets or None,
        prefill_tokens=recipe.rollout.prefill_tokens,
        decode=decode,
        deterministic=recipe.runtime.deterministic,
    )


def instance_core(recipe: Recipe, model_path: str, longest_prompt: int) -> NativeEngine:
    """The core of a rollout instance that has this process, and a copy of the model, for itself."""
    config, device = load_config(model_path), choose_device(recipe.runtime.device)
    free = free_for_instance(recipe, device)
    need = footprint(recipe, config, longest_prompt, device, free=free, trains=False)
    try:
        model = load_model(model_path, choose_dtype(recipe.model.dtype, device), device)
        return make_core(recipe, model, need.kv_tokens, decoder_of(load_tokenizer(model_path)))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(recipe, need, error) from error


def make_trainer(
    recipe: Recipe, model: nn.Module, model_path: str, *, base: str | None = None, ranks: Ranks | None = None
) -> LocalTrainer:
    """The trainer of a policy that begins as `model`, which it takes over; one of `ranks`, where there are others.

    `base` is what an adapter says that it belongs to, where that is not `model_path`.
    """
    lora = recipe.model.lora
    return LocalTrainer(
        model,
        lora=None if lora is None else LoraOptions(lora.rank, lora.alpha, lora.targets),
        options=trainer_options(recipe),
        algorithm=recipe.algorithm,
        reference=_reference(recipe, model_path, choose_device(recipe.runtime.device)),
        tokenizer=load_tokenizer(model_path),
        base=base or model_path,
        ranks=ranks,
    )


def _reference(recipe: Recipe, model_path: str, device: torch.device) -> nn.Module | None:
    """The model that a divergence is measured against, where it is not the policy without its adapters."""
    kl = recipe.algorithm.kl
    if kl is None or kl.reference is None:
        return None
    path = model_path if kl.reference == recipe.model.path else kl.reference
    return load_model(path, choose_dtype(recipe.model.dtype, device), device, option="algorithm.kl.reference")


def trainer_options(recipe: Recipe) -> TrainerOptions:
    """What the trainer needs of the recipe."""
    training = recipe.training
    return TrainerOptions(
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        schedule=training.schedule,
        final_fraction=training.final_fraction or 0.0,
        total_steps=training.steps,
        weight_decay=training.weight_decay,
        betas=training.betas,
        eps=training.epsilon,
        max_grad_norm=training.max_grad_norm,
        micro_tokens=training.micro_tokens,
        checkpointing=training.checkpointing,
        compile=training.compile,
        optimizer_steps=training.optimizer_steps,
        temperature=recipe.rollout.temperature,
        max_tokens=recipe.rollout.max_tokens,
        seed=recipe.seed,
    )


def available_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_threads(recipe: Recipe) -> int:
    """Threads of torch in each rank of a trainer on a cluster."""
    return recipe.runtime.trainer_threads or max(1, int(recipe.runtime.trainer_cpus))


def role_threads(recipe: Recipe) -> tuple[int, int]:
    """Torch threads of an instance and of the trainer; one each on CUDA.

    On the CPU trainer and rollout have all cores each where they take turns, else half each; instances divide theirs.
    OpenMP's pools spin, so two roles that run at once must not ask for more threads than there are cores. On CUDA they
    only launch, and a pool that spins takes time from the launches.
    """
    cores = available_cores()
    share = cores if recipe.plan.staleness == 0 else max(1, cores // 2)
    if choose_device(recipe.runtime.device).type == "cuda":
        share = 1
    each = max(1, share // recipe.runtime.instances)
    return recipe.runtime.engine_threads or each, recipe.runtime.trainer_threads or share


def model_path_of(recipe: Recipe, observer: Observer) -> str:
    if recipe.model.path != "tiny":
        return recipe.model.path
    options = recipe.model.warm_start
    shown_at = time.monotonic()

    def progress(step: int, steps: int, loss: float) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= 5.0 or step == steps:
            shown_at = time.monotonic()
            observer.message(f"warm start of the tiny model: step {step}/{steps}, loss {loss:.3f}")

    warm_start = WarmStart() if options is None or options.steps is None else WarmStart(steps=options.steps)
    return str(tiny_model(seed=0 if options is None else options.seed, warm_start=warm_start, progress=progress))


def _stop_tokens(model_path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends a text, by the model's generation configuration and by its tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # it has none of its own
        generation = GenerationConfig.from_model_config(config)
    found = generation.eos_token_id
    tokens = set(found if isinstance(found, list | tuple) else [found]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in tokens if token is not None))
