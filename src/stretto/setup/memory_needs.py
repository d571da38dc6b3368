"""The memory that a run needs beside the KV cache, by purpose, and what that leaves for the cache on CUDA.

| purpose       | bytes                                                                                            |
|---------------|--------------------------------------------------------------------------------------------------|
| base          | the parameters, once: engine and trainer share them. On CUDA every further instance has its own  |
|               | copy of the layers' matrices, because they lie in one block with its adapters. With vLLM every   |
|               | instance has its own copy of all                                                                 |
| versions      | a slot each, of every instance: adapters, or a whole set of weights                              |
| weight store  | a copy of every live version, and of the one that is being published                             |
| trained       | float32 adapters and their rounded copies, or float32 masters                                    |
| reference     | a second model, if the KL penalty is measured against one                                        |
| teachers      | the models to imitate; those with `keep = "host"` only while they score a batch, when there are  |
|               | no activations to train                                                                          |
| reward model  | that of `task.reward_model`, in a process of its own, if it shares the device                    |
| undo          | a copy of the trained weights and AdamW's averages, if an update has several steps or a critic   |
| optimizer     | AdamW's two averages, float32                                                                    |
| gradients     | float32; with full half-precision weights also those of one backward pass                        |
| working       | activations and logits of a micro-batch, and values for each token that are computed before the   |
|               | first step                                                                                       |
| engine        | captured graphs, workspaces, logits of every row, and buffers to sort them if `rollout` truncates |
| slack         | memory that the allocator cannot use                                                             |

Versions and engine are those of all instances that share the device. The sizes themselves are in `memory_sizes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.engines.vllm.lora_ranks import slot_rank
from stretto.models.expert_products import aligned_rank
from stretto.models.varlen_attention import flash_fits
from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels
from stretto.setup.device import choose_dtype, free_bytes, total_bytes, with_section
from stretto.setup.memory_sizes import (
    activation_bytes,
    engine_bytes,
    engine_rows,
    gib,
    head_size,
    kv_bytes_per_token,
    kv_copies,
    longest_trajectory,
    micro_batch_tokens,
    scored_ahead_bytes,
)
from stretto.setup.parameter_counts import ParameterCounts
from stretto.setup.reward_model_memory import reward_model_footprint
from stretto.setup.teacher_memory import teachers_footprint

SLACK_SHARE = 0.05  # of the memory that is free at the start
MIN_TRAJECTORIES = 2  # of the longest kind that must fit at once; one alone is never batched


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose, as in the table above."""

    base: int
    versions: int
    store: int
    trained: int  # 0 if the base itself is trained in float32
    reference: int
    teachers: int
    reward_model: int
    undo: int
    optimizer: int
    gradients: int
    working: int
    engine: int
    slack: int
    kv: int  # of all instances on the device
    kv_tokens: int  # of one instance
    one_base: int = 0  # of `base`, one copy

    @property
    def total(self) -> int:
        return self.without_kv + self.kv

    @property
    def without_kv(self) -> int:
        return sum(num_bytes for _, num_bytes in self._purposes())

    def _purposes(self) -> Iterator[tuple[str, int]]:
        yield "base", self.base
        yield "versions", self.versions
        yield "weight store", self.store
        yield "trained", self.trained
        yield "reference", self.reference
        yield "teachers", self.teachers
        yield "reward model", self.reward_model
        yield "undo", self.undo
        yield "optimizer", self.optimizer
        yield "gradients", self.gradients
        yield "working (estimate)", self.working
        yield "engine", self.engine
        yield "slack", self.slack

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self._purposes() if num_bytes)


def instances_per_device(recipe: Recipe) -> int:
    """Returns the number of instances that share one device: all of them in one process, one on a cluster."""
    return recipe.runtime.instances if recipe.runtime.type == "local" else 1


def device_part(recipe: Recipe) -> float:
    """Returns the share of a device that an instance on a cluster may use."""
    shares = (recipe.runtime.instance_gpus, recipe.engine.gpu_memory)
    return min([1.0, *(each for each in shares if each is not None)])


def share_limits(recipe: Recipe) -> bool:
    """True if `engine.gpu_memory` sets the memory of an instance on a cluster."""
    if recipe.runtime.type != "ray" or recipe.engine.gpu_memory is None:
        return False
    return device_part(with_section(recipe, "engine", gpu_memory=None)) > recipe.engine.gpu_memory


def without_kv(
    recipe: Recipe, config: Any, counted: CountedModels, longest_prompt: int, device: torch.device, free: int
) -> Footprint:
    """Returns the plan with no KV cache in it."""
    assert counted.policy.lora == recipe.model.lora, "the policy was counted with other adapters"
    dtype, on_cuda = choose_dtype(recipe.model.dtype, device), device.type == "cuda"
    text, lora, instances = config.get_text_config(), recipe.model.lora, instances_per_device(recipe)
    policy, devices = counted.policy, recipe.engine.tensor_parallel
    version, trained = policy.trained * dtype.itemsize, policy.trained * torch.float32.itemsize
    half, full = dtype != torch.float32, lora is None
    slots = recipe.num_slots + _extra_slots(recipe)
    activations = activation_bytes(
        text,
        micro_batch_tokens(recipe, longest_trajectory(recipe, longest_prompt)),
        dtype,
        device,
        packed=policy.is_lean and flash_fits(device, dtype, head_size(text)),
        trains_head=full,
        checkpointing=recipe.training.checkpointing,
        adapts_experts=policy.on_experts > 0,
    )
    teachers = teachers_footprint(recipe, counted.teachers, dtype, device, longest_trajectory(recipe, longest_prompt))
    return Footprint(
        base=base_bytes(recipe, counted, device),
        versions=instances * slots * _slot_bytes(recipe, policy, version, dtype),
        store=(recipe.plan.slots + 1) * version,
        trained=(trained if half else 0) if full else trained + (version if half else 0),
        reference=counted.reference * dtype.itemsize,
        teachers=teachers.resident,
        reward_model=reward_model_footprint(recipe, counted.reward_models, device),
        undo=3 * trained if recipe.training.optimizer_steps > 1 or recipe.algorithm.uses_critic else 0,
        optimizer=2 * trained,
        gradients=trained + (version if half and full else 0),
        working=max(activations + teachers.training, teachers.scoring) + scored_ahead_bytes(recipe) + teachers.scores,
        engine=instances * devices * engine_bytes(recipe, text, policy, dtype) if on_cuda else 0,
        slack=int(SLACK_SHARE * free) if on_cuda else 0,
        kv=0,
        kv_tokens=0,
        one_base=policy.total * dtype.itemsize,
    )


def base_bytes(recipe: Recipe, counted: CountedModels, device: torch.device) -> int:
    """Returns the bytes of the parameters of the policy: once, and the copies of instances that have their own."""
    policy, dtype, instances = counted.policy, choose_dtype(recipe.model.dtype, device), instances_per_device(recipe)
    parameters = policy.total
    if recipe.engine.type == "vllm":
        parameters += (instances if recipe.runtime.type == "local" else 0) * policy.total
    elif device.type == "cuda" and recipe.model.lora is not None and policy.is_fused:
        parameters += (instances - 1) * policy.in_matrices
    return parameters * dtype.itemsize


def instance_alone(need: Footprint) -> Footprint:
    """Returns the plan without the parts of the trainer and the weight store."""
    return replace(need, store=0, trained=0, reference=0, teachers=0, undo=0, optimizer=0, gradients=0, working=0)


def _extra_slots(recipe: Recipe) -> int:
    """Returns the version slots that an engine has beyond those of the recipe: vLLM loads into a free one, and full
    weights in place."""
    if recipe.engine.type != "vllm":
        return 0
    return -1 if recipe.model.lora is None else 1


def _slot_bytes(recipe: Recipe, policy: ParameterCounts, version: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a slot for a `version` of so many: engines have slots for some ranks only.

    Those of vLLM are for a few ranks. Those of the native engine have padded adapters on experts.
    """
    lora = recipe.model.lora
    if lora is None:
        return version
    if recipe.engine.type == "vllm":
        return version * slot_rank(lora.rank) // lora.rank
    on_experts = policy.on_experts * dtype.itemsize
    return version + on_experts * (aligned_rank(lora.rank, dtype) - lora.rank) // lora.rank


def kv_bytes_on_cuda(recipe: Recipe, config: Any, device: torch.device) -> int:
    """Returns the bytes of a token's keys and values on all devices of an instance."""
    text, dtype = config.get_text_config(), choose_dtype(recipe.model.dtype, device)
    return kv_bytes_per_token(text, dtype, records_routing=recipe.training.records_routing) * kv_copies(recipe, text)


def least_kv_tokens(recipe: Recipe, one: int) -> int:
    """Returns the fewest KV tokens that an instance on CUDA can have: those that the recipe names, or a few rows'.

    `one` is the length of the longest trajectory.
    """
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens // recipe.runtime.instances
    return min(MIN_TRAJECTORIES, engine_rows(recipe)) * one


def room_for_kv(recipe: Recipe, need: Footprint, free: int, total: int) -> int:
    """Returns the bytes that the plan leaves for the KV of all instances on the device; below 0 if it does not fit."""
    return min(free - need.without_kv, _room_of_instances(recipe, need, total))


def _room_of_instances(recipe: Recipe, need: Footprint, total: int) -> int:
    """Returns the bytes that the KV of all instances in one process may have: `engine.gpu_memory` limits each of them.

    `total` is the memory of the device, within `runtime.device_gib`.
    """
    share, instances = recipe.engine.gpu_memory, instances_per_device(recipe)
    if share is None or recipe.runtime.type != "local":  # on a cluster it limits what the plan begins with
        return total
    return instances * (int(share * total) - need.one_base) - need.versions - need.engine


def spare_bytes(
    recipe: Recipe,
    config: Any,
    counted: CountedModels,
    longest_prompt: int,
    device: torch.device,
    *,
    free: int | None = None,
    trains: bool = True,
) -> int:
    """Returns the bytes on CUDA that are left beside the plan and the smallest KV cache; below 0 if these do not fit.

    `free` and `trains` are those of `footprint`.
    """
    total = free
    if free is None:
        free, total = free_bytes(recipe, device), total_bytes(recipe, device)
    need = without_kv(recipe, config, counted, longest_prompt, device, free)
    room = room_for_kv(recipe, need if trains else instance_alone(need), free, total or free)
    tokens = instances_per_device(recipe) * least_kv_tokens(recipe, longest_trajectory(recipe, longest_prompt))
    return room - tokens * kv_bytes_on_cuda(recipe, config, device)


def describe_kv(recipe: Recipe, need: Footprint) -> str:
    """Returns the size of the KV cache as text."""
    each = f" on each of {recipe.runtime.instances} instances" if instances_per_device(recipe) > 1 else ""
    return f"KV {gib(need.kv)} for {need.kv_tokens:,} tokens{each}"
