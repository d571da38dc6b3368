"""What a run will need in memory, told before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stretto.config import Recipe
from stretto.models import load_config
from stretto.training.lora import inject_lora

KV_BYTES_BY_DEFAULT = 4 << 30  # cap of the KV cache where the recipe does not name one
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose."""

    base: int
    versions: int  # adapters or weight slots of the engine
    store: int  # the weight store: a copy of every live version, and of the one that is published
    trained: int  # what the trainer steps, where it is not the base itself: adapters, or float32 masters
    optimizer: int
    gradients: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return self.base + self.versions + self.store + self.trained + self.optimizer + self.gradients + self.kv


def context_length(config: Any) -> int:
    """The longest prompt plus completion that the model was made for."""
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def kv_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values of one token over all layers: on the CPU float32, whatever the type of the weights."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * torch.float32.itemsize)


def engine_rows(recipe: Recipe) -> int:
    """Rows of the engine: the target of the rollout, and some for the evaluation that runs beside it."""
    rows = recipe.plan.rows
    return rows + (min(recipe.evaluation.prompts, max(8, rows // 4)) if recipe.evaluation.prompts else 0)


def kv_tokens(recipe: Recipe, config: Any, longest_prompt: int) -> int:
    """Tokens of context that the engine holds: the recipe's, or what every row needs under a cap of memory."""
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens
    one = longest_prompt + max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0) + 32
    cap = KV_BYTES_BY_DEFAULT // kv_bytes_per_token(config)
    return max(one, min(engine_rows(recipe) * one, cap))


def footprint(recipe: Recipe, config: Any, longest_prompt: int) -> Footprint:
    """Count parameters on the meta device; nothing is allocated."""
    dtype = getattr(torch, recipe.model.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    lora = recipe.model.lora
    if lora is not None:
        inject_lora(model, lora.rank, 2.0 * lora.rank, lora.targets)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    version, stepped = count * dtype.itemsize, count * torch.float32.itemsize
    is_base = lora is None and dtype == torch.float32  # then the optimizer steps the base itself
    tokens = kv_tokens(recipe, config, longest_prompt)
    return Footprint(
        base=base,
        versions=recipe.num_slots * version,
        store=(recipe.num_slots + 1) * version,
        trained=0 if is_base else stepped,
        optimizer=2 * stepped,
        gradients=stepped,
        kv=tokens * kv_bytes_per_token(config),
        kv_tokens=tokens,
    )


def describe_memory(recipe: Recipe) -> str:
    """The plan and its memory, for `stretto check`. Prompts are taken to be at most as long as completions."""
    plan = recipe.plan
    if recipe.model.path == "tiny":
        from stretto.tiny import tiny_config

        config = tiny_config()
    else:
        config = load_config(recipe.model.path)
    need = footprint(recipe, config, longest_prompt=recipe.rollout.max_tokens)
    bound = f"at most {plan.staleness} (auto)" if plan.auto else str(plan.staleness)
    lines = [
        f"# {plan.paradigm.name}: K = {bound}, {plan.in_flight} groups in flight, {plan.rows} rows, "
        f"{recipe.num_slots} version slots, {plan.updates} updates of {plan.batch} x {plan.group_size} trajectories",
        f"# memory: base {_gib(need.base)}, versions {_gib(need.versions)}, weight store {_gib(need.store)}, "
        f"trained {_gib(need.trained)}, optimizer {_gib(need.optimizer)}, gradients {_gib(need.gradients)}, "
        f"KV {_gib(need.kv)} for {need.kv_tokens:,} tokens; "
        f"together {_gib(need.total)} and activations",
    ]
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
