"""The vLLM engine of a rollout instance, made from a recipe, and the checks of a model that vLLM is to serve."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.frames import ChildOptions
from stretto.engines.vllm.process import START_S, ChildProcess
from stretto.engines.vllm.releases import refuse_top_k
from stretto.environments.single_turn import Decode
from stretto.errors import RecipeError
from stretto.models.loading import load_config
from stretto.models.lora import adapted_modules
from stretto.models.routing import is_mixture
from stretto.recipe.engine_checks import refused_mixture
from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import count_models
from stretto.setup.device import choose_device, choose_dtype, prepare_device
from stretto.setup.expert_checks import expert_targets
from stretto.setup.memory import footprint, free_for_instance
from stretto.setup.memory_needs import Footprint, instances_per_device
from stretto.setup.memory_sizes import context_length, engine_rows, kv_bytes_per_token, kv_copies
from stretto.setup.prefill_chunk_size import for_instance

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The last parts of the names of the layers that vLLM adapts in every plain decoder."""
KV_BLOCK = {"cpu": 32, "cuda": 16}  # tokens
STREAM_TOKENS = {"cpu": 1, "cuda": 16}  # a message for every token costs 9 % of 256 rows on a GPU
MAX_SHARE = 0.95  # of the memory of a GPU
CLUSTER_START_S = 1_740.0  # for vLLM to load the largest models: a cluster waits a minute longer for an instance
MAX_PARALLEL = 64  # devices of an instance, as the recipe allows
VOCABULARY_BLOCK = 64  # vLLM pads the vocabulary to a multiple of this


def check_vllm_model(recipe: Recipe, config: Any) -> None:
    """Raises `RecipeError` if vLLM cannot serve the recipe's model as it asks. Does nothing with another engine.

    `runtime.device` has to be known for what vLLM can do only on a GPU.
    """
    if recipe.engine.type != "vllm":
        return
    refuse_top_k(recipe.rollout.top_k, recipe.runtime.device)
    text, devices = config.get_text_config(), recipe.engine.tensor_parallel
    if experts := expert_targets(recipe, config):
        raise RecipeError(
            f'`model.lora.targets` names `{experts[0]}` of experts, which `engine.type = "vllm"` cannot adapt; it '
            'serves no mixture of experts at all: use "native"'
        )
    if is_mixture(config):
        raise RecipeError(refused_mixture(recipe.model.path))
    if devices not in (fitting := fitting_parallel(text)):
        heads, kv_heads, width, words = _divided(text)
        raise RecipeError(
            f"`engine.tensor_parallel = {devices}` does not divide the {heads} heads and {kv_heads} key-value heads of "
            f"`{recipe.model.path}`, its feed-forward width {width} and its vocabulary, padded to {words}; use one of "
            f"{', '.join(map(str, fitting))}"
        )
    adapted = lora_targets(recipe, config)
    if other := sorted(set(adapted) - set(ADAPTABLE)):
        could = [name for name in ADAPTABLE if name in adapted]
        fix = f"set `model.lora.targets = {json.dumps(could)}`, or use" if could else "use"
        raise RecipeError(
            f"`model.lora` adapts {', '.join(f'`{each}`' for each in other)} of `{recipe.model.path}`, which "
            f'`engine.type = "vllm"` cannot; {fix} "native"'
        )


def fitting_parallel(config: Any) -> list[int]:
    """Returns the values of `engine.tensor_parallel` that vLLM can divide a model by, in rising order."""
    heads, kv_heads, width, words = _divided(config)
    return [
        n
        for n in range(1, min(heads, MAX_PARALLEL) + 1)
        if heads % n == width % n == words % n == 0 and max(kv_heads, n) % min(kv_heads, n) == 0
    ]


def _divided(config: Any) -> tuple[int, int, int, int]:
    """Returns what is divided over devices: heads, key-value heads, the feed-forward width, the padded vocabulary.

    Key-value heads may also be copied, so that several devices have the same one.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return heads, kv_heads, width, -(-int(config.vocab_size) // VOCABULARY_BLOCK) * VOCABULARY_BLOCK


def lora_targets(recipe: Recipe, config: Any) -> tuple[str, ...]:
    """Returns the last parts of the names of the layers that the recipe adapts; none with full weights."""
    if recipe.model.lora is None:
        return ()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = adapted_modules(model, recipe.model.lora.targets)
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def child_options(
    recipe: Recipe, model_path: str, need: Footprint, device: torch.device, threads: int | None
) -> ChildOptions:
    """Returns the options of a child process, with the KV cache that the memory plan leaves it."""
    config = load_config(model_path)
    dtype, lora = choose_dtype(recipe.model.dtype, device), recipe.model.lora
    block = KV_BLOCK[device.type]
    text = config.get_text_config()
    spare = 2 if getattr(text, "sliding_window", None) else 1  # one is vLLM's own, one lets a window begin in a block
    kv_tokens = (-(-need.kv_tokens // block) + spare) * block
    kv_bytes = kv_tokens * kv_bytes_per_token(text, dtype, records_routing=False) * kv_copies(recipe, text)
    return ChildOptions(
        model=model_path,
        kind="full" if lora is None else "lora",
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        device=device.type,  # type: ignore[arg-type]
        slots=recipe.num_slots,
        lora_rank=0 if lora is None else lora.rank,
        rows=engine_rows(recipe),
        max_context=min(context_length(config), need.kv_tokens),
        kv_bytes=kv_bytes,
        kv_block=block,
        prefill_tokens=recipe.rollout.prefill_chunk_tokens,
        file_bytes=_file_bytes(recipe, need),
        lora_targets=lora_targets(recipe, config),
        tensor_parallel=recipe.engine.tensor_parallel,
        device_share=_device_share(recipe, need, kv_bytes, device),
        threads=threads,
        stream_tokens=1 if records_masks(recipe) else STREAM_TOKENS[device.type],
        masks=records_masks(recipe),
    )


def _file_bytes(recipe: Recipe, need: Footprint) -> int:
    """Returns the bytes of the files of weights of all instances: one set of full weights each, or all its adapters."""
    own = need.one_base if recipe.model.lora is None else need.versions // instances_per_device(recipe)
    return recipe.runtime.instances * own


def records_masks(recipe: Recipe) -> bool:
    """True if training needs what truncated sampling leaves of each distribution."""
    return recipe.rollout.top_k > 0


def _device_share(recipe: Recipe, need: Footprint, kv_bytes: int, device: torch.device) -> float | None:
    """Returns the share of each GPU that must be free when the child starts: what the plan has for it.

    It is of the whole GPU, also under `runtime.device_gib`. It is nothing else to vLLM, which is told the size of its
    KV cache.
    """
    if device.type != "cuda":
        return None
    total = torch.cuda.mem_get_info(device)[1] * recipe.engine.tensor_parallel
    own = (need.versions + need.engine) // instances_per_device(recipe)
    return min(MAX_SHARE, (need.one_base + own + kv_bytes) / total)


def make_vllm_engine(
    recipe: Recipe,
    model_path: str,
    need: Footprint,
    device: torch.device,
    decode: Decode,
    *,
    threads: int | None = None,
    start_s: float = START_S,
) -> VllmEngine:
    """Starts a child process with vLLM. Raises `RecipeError` if that cannot be, or takes longer than `start_s`."""
    options = child_options(recipe, model_path, need, device, threads)
    process = ChildProcess(options, start_s=start_s, answer_s=recipe.runtime.instance_seconds)
    return VllmEngine(process, options, kv_tokens=need.kv_tokens, decode=decode)


def make_vllm_instance(recipe: Recipe, model_path: str, longest_prompt: int, decode: Decode) -> VllmEngine:
    """Makes the engine of a rollout instance that has a process, and devices, for itself."""
    config, device = load_config(model_path), choose_device(recipe.runtime.device)
    prepare_device(recipe, device)
    free, counted = free_for_instance(recipe, device), count_models(recipe, config, device)
    recipe = for_instance(recipe, config, counted, longest_prompt, device, free)
    need = footprint(recipe, config, longest_prompt, device, counted=counted, free=free, trains=False)
    return make_vllm_engine(recipe, model_path, need, device, decode, start_s=CLUSTER_START_S)
