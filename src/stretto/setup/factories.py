"""Factories for the driver's inputs, rollout engines and trainers. Local runs and runs on a cluster share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import SteppedEngine
from stretto.environments.given import NOTHING_GIVEN, Given
from stretto.environments.single_turn import Decode
from stretto.environments.tasks import Task
from stretto.models.adapters import read_adapter, refuse_another_base
from stretto.models.loading import load_config, load_model, load_tokenizer
from stretto.models.stop_tokens import stop_tokens
from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe
from stretto.setup.architecture_checks import check_architecture
from stretto.setup.base_models import base_path_of, starting_adapter
from stretto.setup.counted_models import count_models
from stretto.setup.device import choose_device, choose_dtype, prepare_device
from stretto.setup.expert_checks import check_expert_slots
from stretto.setup.inputs import Inputs, check_objective, load_inputs, prompt_tokenizer
from stretto.setup.memory import footprint, free_for_instance
from stretto.setup.memory_advice import out_of_memory
from stretto.setup.memory_sizes import context_length, engine_rows
from stretto.setup.prefill_chunk_size import for_instance
from stretto.setup.teachers import check_teachers, load_teachers, policy_vocabulary
from stretto.setup.threads import ThreadCounts, thread_counts
from stretto.setup.vllm_engines import check_vllm_model, make_vllm_instance
from stretto.training.learning_rates import LearningRates
from stretto.training.parallel import Ranks
from stretto.training.trainer import LocalTrainer
from stretto.types import Sampling


@dataclass(slots=True)
class DriverInputs:
    """Tokenizer, prompts and sampling defaults. Read before anything runs, so that bad input shows first."""

    inputs: Inputs
    decode: Decode  # tokens to text
    sampling: Sampling
    threads: ThreadCounts
    vocabulary: int  # rows of the embedding: every token id is below
    tokenizer: Any


def load_driver_inputs(
    recipe: Recipe,
    model_path: str,
    given: Given = NOTHING_GIVEN,
    prompt_limits: Mapping[str | None, int] | None = None,
    read: Sequence[Task] | None = None,
) -> DriverInputs:
    """Reads the inputs of a run and checks them against tokenizer and configuration. Does not read the weights.

    `prompt_limits` are those of a run that is resumed, `read` the tasks that were read already (`load_inputs`).
    """
    check_objective(recipe)
    own, config = load_tokenizer(model_path), load_config(model_path)
    check_vllm_model(recipe, config)
    check_expert_slots(recipe, config)
    tokenizer = prompt_tokenizer(recipe, own)
    inputs = load_inputs(
        recipe,
        own,
        context=context_length(config),
        model_path=model_path,
        given=given,
        prompt_limits=prompt_limits,
        read=read,
    )
    check_architecture(recipe, config, inputs.longest_prompt)
    check_teachers(recipe, tokenizer, inputs.longest_prompt)
    sampling = Sampling(
        max_tokens=recipe.rollout.max_tokens,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
        min_p=recipe.rollout.min_p,
        stop_tokens=stop_tokens(model_path, config, tokenizer),
        stop_strings=recipe.rollout.stop,
        routing=recipe.training.records_routing,
    )
    vocabulary = int(config.get_text_config().vocab_size)
    return DriverInputs(inputs, decoder_of(tokenizer), sampling, thread_counts(recipe), vocabulary, tokenizer)


def decoder_of(tokenizer: Any) -> Decode:
    """Returns a function from tokens to text without special tokens."""
    # `decode` looks at every token, in case one is an array, which takes twice as long as turning them into text.
    of_ids = getattr(tokenizer, "_decode", tokenizer.decode)

    @lru_cache(maxsize=8)  # journal and environment need the same text, one right after the other
    def text_of(tokens: tuple[int, ...]) -> str:
        return str(of_ids(list(tokens), skip_special_tokens=True))

    def decode(tokens: Sequence[int]) -> str:
        return text_of(tuple(tokens))

    return decode


def make_native_engine(recipe: Recipe, model: nn.Module, kv_tokens: int, decode: Decode) -> NativeEngine:
    """Makes the engine of a rollout instance from a model that is loaded."""
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
        prefill_tokens=recipe.rollout.prefill_chunk_tokens,
        decode=decode,
        deterministic=recipe.runtime.deterministic,
        records_routing=recipe.training.records_routing,
    )


def make_instance_engine(recipe: Recipe, model_path: str, longest_prompt: int) -> SteppedEngine:
    """Loads the model and makes the engine of a rollout instance that has a process for itself."""
    if recipe.engine.type == "vllm":
        return make_vllm_instance(recipe, model_path, longest_prompt, decoder_of(load_tokenizer(model_path)))
    config, device = load_config(model_path), choose_device(recipe.runtime.device)
    prepare_device(recipe, device)
    free, counted = free_for_instance(recipe, device), count_models(recipe, config, device)
    recipe = for_instance(recipe, config, counted, longest_prompt, device, free)
    need = footprint(recipe, config, longest_prompt, device, counted=counted, free=free, trains=False)
    try:
        model = load_model(model_path, choose_dtype(recipe.model.dtype, device), device)
        return make_native_engine(recipe, model, need.kv_tokens, decoder_of(load_tokenizer(model_path)))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(recipe, need, longest_prompt, error) from error


def make_trainer(
    recipe: Recipe,
    model: nn.Module,
    model_path: str,
    *,
    base: str | None = None,
    ranks: Ranks | None = None,
    rates: LearningRates | None = None,
    adapter: str | None = None,
    teachers: Sequence[str] | None = None,
) -> LocalTrainer:
    """Makes the trainer of a policy that begins as `model`, and that it changes in place. `ranks`: one of several.

    `base` is the name of the base model in an exported adapter; None: `model_path`. `rates` are the learning rates of
    a run with several phases; None: those of the recipe. `adapter` is where the adapter of the recipe lies on this
    machine; None: where the recipe says, or where its warm start left it. `teachers` are where its teachers lie.
    """
    device, found = choose_device(recipe.runtime.device), adapter or starting_adapter(recipe, Silent())
    continued = None if found is None else read_adapter(found)
    tokenizer = load_tokenizer(model_path)
    trainer = LocalTrainer(
        model,
        lora=recipe.model.lora,
        adapter=continued,
        options=recipe.training,
        rates=rates,
        algorithm=recipe.algorithm,
        reference=_reference(recipe, model_path, device),
        teachers=list(load_teachers(recipe, model, device, teachers)),
        vocabulary=policy_vocabulary(recipe, tokenizer),
        tokenizer=tokenizer,
        base=base or model_path,
        ranks=ranks,
        temperature=recipe.rollout.temperature,
        max_tokens=recipe.rollout.max_tokens,
        seed=recipe.seed,
        probes=recipe.engine.type == "vllm",
    )
    if continued is not None:
        refuse_another_base(continued, recipe.model.path, trainer.base_checksum() or "", trainer.weights_dtype)
    return trainer


def _reference(recipe: Recipe, model_path: str, device: torch.device) -> nn.Module | None:
    """Loads the reference model of the KL penalty. None if there is none, or it is the policy without adapters."""
    kl = recipe.algorithm.kl
    if kl is None or kl.reference is None:
        return None
    path = kl.reference
    if path == recipe.model.path:
        path = base_path_of(recipe, Silent()) if recipe.model.merge_adapter else model_path
    return load_model(path, choose_dtype(recipe.model.dtype, device), device, option="algorithm.kl.reference")
