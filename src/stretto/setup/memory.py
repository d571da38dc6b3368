"""The memory plan of a run, made before anything starts.

On CUDA the KV cache gets the memory that the rest leaves free; `memory_needs.py` has the table of the rest. Activations
are an estimate. If it is too low, an update runs out of memory and is repeated with smaller micro-batches, then with
less KV (`local/trainer.py`). If it is too high, the cache is smaller than it could be. A plan that does not fit is
refused, with the options to change (`memory_advice.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from stretto.errors import RecipeError
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import choose_dtype, free_bytes, planned_bytes, total_bytes
from stretto.setup.memory_advice import DOES_NOT_FIT, PlannedMemory, advice_on
from stretto.setup.memory_needs import (
    MIN_TRAJECTORIES,
    Footprint,
    device_part,
    instance_alone,
    instances_per_device,
    kv_bytes_on_cuda,
    least_kv_tokens,
    room_for_kv,
    share_limits,
    without_kv,
)
from stretto.setup.memory_sizes import GIB, engine_rows, gib, kv_bytes_per_token, longest_trajectory
from stretto.training.sharding import SHARDED_FROM

KV_BYTES_BY_DEFAULT = 4 * GIB  # cap of the KV cache on the CPU, unless the recipe sets one


def free_for_instance(recipe: Recipe, device: torch.device, planned: PlannedDevices | None = None) -> int | None:
    """Returns the free bytes of an instance on a cluster; None on the CPU.

    It may have a fraction of a GPU, or several that vLLM cuts the model over. With `planned` these are devices that are
    not here.
    """
    if device.type != "cuda":
        return None
    if planned is not None:
        free = total = planned_bytes(recipe, planned)
    else:
        free, total = free_bytes(recipe, device), total_bytes(recipe, device)
    return min(free, int(total * device_part(recipe))) * recipe.engine.tensor_parallel


def footprint(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int | None = None,
    trains: bool = True,
    here: bool = True,
) -> Footprint:
    """Plans the memory of a run on `device`.

    `counted` are its models; None: they are counted here. `free` are the bytes to plan with on CUDA; None asks the
    device. Without `trains` the plan is for an instance alone: trainer and weight store are in other processes. Without
    `here` it is for a device of another machine. Raises `RecipeError` with all sizes and the options to change if too
    little is left for the KV cache on CUDA.
    """
    on_cuda, instances = device.type == "cuda", instances_per_device(recipe)
    asked = total = free
    if on_cuda and free is None:
        free, total = free_bytes(recipe, device), total_bytes(recipe, device)
    counted = counted or count_models(recipe, config, device)
    need = without_kv(recipe, config, counted, longest_prompt, device, free or 0)
    if not trains:
        need = instance_alone(need)
    if free is not None and on_cuda:
        per_token, known = kv_bytes_on_cuda(recipe, config, device), free
        room = max(0, room_for_kv(recipe, need, free, total or free))
        one = longest_trajectory(recipe, longest_prompt)

        def advise() -> str:
            model = PlannedMemory(config, counted, longest_prompt, device, asked, trains)
            return advice_on(recipe, model, need, known, here=here)

        tokens = _kv_tokens_on_cuda(recipe, need, one, per_token, free, room, advise)
    else:
        text = config.get_text_config()
        per_token = kv_bytes_per_token(text, records_routing=recipe.training.records_routing)
        tokens = kv_tokens(recipe, text, longest_prompt)
    return replace(need, kv=instances * tokens * per_token, kv_tokens=tokens)


def rank_footprint(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    counted: CountedModels | None = None,
    free: int = 0,
) -> Footprint:
    """Plans the memory of one rank of the trainer on a cluster. `free` are the bytes that it has on CUDA.

    `counted` are the models of the run; None: they are counted here.

    Full weights of several ranks are sharded (`training/sharding.py`): a rank has its part of the layers, and one layer
    whole while that runs and the next is fetched. Everything else is whole on every rank.
    """
    counted = counted or count_models(recipe, config, device)
    need = without_kv(recipe, config, counted, longest_prompt, device, free)
    need = replace(need, versions=0, store=0, engine=0)
    if not is_sharded(recipe, counted):
        return need
    parameters, in_layers = counted.policy.total, counted.policy.in_layers
    part = (parameters - in_layers + in_layers / recipe.runtime.trainers) / parameters
    layer = in_layers // config.get_text_config().num_hidden_layers * choose_dtype(recipe.model.dtype, device).itemsize
    return replace(
        need,
        base=int(need.base * part),
        trained=int(need.trained * part),
        undo=int(need.undo * part),
        optimizer=int(need.optimizer * part),
        gradients=int(need.gradients * part),
        working=need.working + 2 * layer,
    )


def is_sharded(recipe: Recipe, counted: CountedModels) -> bool:
    """True if the ranks of the trainer shard the layers."""
    return recipe.model.lora is None and recipe.runtime.trainers > 1 and counted.policy.total >= SHARDED_FROM


def kv_tokens(recipe: Recipe, config: Any, longest_prompt: int) -> int:
    """Returns the KV tokens of an instance on the CPU: its share of the recipe's, or what its rows need under a cap."""
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens // recipe.runtime.instances
    one = longest_trajectory(recipe, longest_prompt)
    per_token = kv_bytes_per_token(config, records_routing=recipe.training.records_routing)
    cap = KV_BYTES_BY_DEFAULT // (per_token * instances_per_device(recipe))
    return max(one, min(engine_rows(recipe) * one, cap))


def _kv_tokens_on_cuda(
    recipe: Recipe, need: Footprint, one: int, per_token: int, free: int, room: int, advise: Callable[[], str]
) -> int:
    """Returns the KV tokens of one instance: its share of the `room` that is left, at most what its rows can need.

    `one` is the length of the longest trajectory. Raises `RecipeError` with what `advise` returns if too little
    memory is left.
    """
    rows, instances = engine_rows(recipe), instances_per_device(recipe)
    left = room // (per_token * instances)
    named, least = recipe.rollout.kv_tokens is not None, least_kv_tokens(recipe, one)
    if left < least:
        what = (
            f"{min(MIN_TRAJECTORIES, rows)} trajectories of up to {one:,} tokens need"
            if not named
            else f"`rollout.kv_tokens = {recipe.rollout.kv_tokens}` needs"
        )
        if instances > 1:
            what = f"on each of `runtime.instances = {instances}` {what}"
        has = f"{gib(free)} of the device are free"
        if share_limits(recipe):
            has = f"`engine.gpu_memory = {recipe.engine.gpu_memory:g}` leaves it {gib(free)} of the device"
        raise RecipeError(
            f"{DOES_NOT_FIT}{has}; {need}; that leaves {gib(room)} for KV, and {what} {gib(least * per_token)}. "
            f"{advise()}"
        )
    return least if named and least else min(rows * one, left)
