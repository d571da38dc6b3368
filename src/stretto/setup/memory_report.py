"""The memory plan as `stretto check` prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from stretto.models.loading import load_config
from stretto.models.tiny import tiny_config_of
from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_device, choose_dtype, describe_device, free_bytes
from stretto.setup.memory import describe_kv, footprint, free_for_instance
from stretto.setup.memory_sizes import gib
from stretto.training.sharding import SHARDED_FROM

UNBOUNDED = 1 << 60  # free bytes, to plan for a device that is not this one


def describe_memory(recipe: Recipe, longest_prompt: int | None = None) -> str:
    """Returns the plan of the run and its memory. `longest_prompt` None: prompts are as long as completions."""
    plan, device = recipe.plan, choose_device(recipe.runtime.device)
    config = tiny_config_of(recipe.model.path) if recipe.model.is_tiny else load_config(recipe.model.path)
    longest = longest_prompt or recipe.rollout.max_tokens
    describe = _on_cluster if recipe.runtime.type == "ray" else _in_one_process
    bound = f"at most {plan.staleness} (auto)" if plan.auto else str(plan.staleness)
    dtype = str(choose_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    free = f", {gib(free_bytes(recipe, device))} free" if device.type == "cuda" else ""
    slots, count = f"{recipe.num_slots} version slots", recipe.runtime.instances
    started = f" of {plan.batch + plan.reserve_groups} x {plan.members} that are started" if plan.redundant else ""
    lines = [
        f"# {plan.paradigm.name}: K = {bound}, {plan.in_flight} groups in flight, {plan.rows} rows, "
        f"{f'{count} instances of {slots}' if count > 1 else slots}, "
        f"{plan.updates} updates of {plan.batch} x {plan.group_size} trajectories{started}",
        f"# device: {describe_device(device)}, weights in {dtype}{free}",
        *describe(recipe, config, longest, device),
    ]
    return "\n".join(lines)


def _in_one_process(recipe: Recipe, config: Any, longest_prompt: int, device: torch.device) -> list[str]:
    need = footprint(recipe, config, longest_prompt, device)
    return [f"# memory: {need}, {describe_kv(recipe, need)}; together {gib(need.total)}"]


def _on_cluster(recipe: Recipe, config: Any, longest_prompt: int, device: torch.device) -> list[str]:
    """Describes an instance and the trainer apart: each has its own device, or a share of one."""
    free = free_for_instance(recipe, device)
    need = footprint(recipe, config, longest_prompt, device, free=free, trains=False)
    whole = footprint(recipe, config, longest_prompt, device, free=UNBOUNDED)
    trainer = replace(whole, versions=0, store=0, engine=0, slack=0, kv=0, kv_tokens=0)
    parameters, ranks = whole.base // choose_dtype(recipe.model.dtype, device).itemsize, recipe.runtime.trainers
    sharded = recipe.model.lora is None and ranks > 1 and parameters >= SHARDED_FROM
    return [
        f"# memory of an instance: {need}, {describe_kv(recipe, need)}; together {gib(need.total)}",
        f"# memory of the trainer: {trainer}; together {gib(trainer.total)}"
        + (f", its layers cut over {ranks} ranks" if sharded else ""),
    ]
