"""The memory plan of a run, made before anything starts.

On CUDA the KV cache gets the memory that the rest leaves free. The rest is:

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

Versions, engine and KV are those of all instances that share the device. Activations are an estimate. If it is too low,
an update runs out of memory and is repeated with smaller micro-batches, then with less KV (`local/trainer.py`). If it
is too high, the cache is smaller than it could be. The sizes themselves are in `memory_sizes.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.engines.vllm.lora_ranks import slot_rank
from stretto.errors import RecipeError, first_line
from stretto.models.expert_products import aligned_rank
from stretto.models.varlen_attention import flash_fits
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import PREFILL_TOKENS, Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import choose_dtype, free_bytes, planned_bytes, total_bytes, with_section
from stretto.setup.memory_sizes import (
    GIB,
    activation_bytes,
    engine_bytes,
    engine_rows,
    gib,
    head_size,
    holds_several,
    kv_bytes_per_token,
    kv_copies,
    longest_trajectory,
    micro_batch_tokens,
    scored_ahead_bytes,
)
from stretto.setup.parameter_counts import ParameterCounts
from stretto.setup.reward_model_memory import reward_model_footprint
from stretto.setup.teacher_memory import teachers_footprint
from stretto.training.options import LEAST_MICRO_TOKENS
from stretto.training.sharding import SHARDED_FROM

KV_BYTES_BY_DEFAULT = 4 * GIB  # cap of the KV cache on the CPU, unless the recipe sets one
SLACK_SHARE = 0.05  # of the memory that is free at the start
DOES_NOT_FIT = "the run does not fit: "
MOST_SHARE = 0.95  # of a device, that `engine.gpu_memory` is advised to be
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
    return min(free, int(total * _device_part(recipe))) * recipe.engine.tensor_parallel


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
    device. Without `trains` the plan is for an instance alone:
    trainer and weight store are in other processes. Without `here` it is for a device of another machine. Raises
    `RecipeError` with all sizes and the options to change if too little is left for the KV cache on CUDA.
    """
    on_cuda, instances = device.type == "cuda", instances_per_device(recipe)
    asked = total = free
    if on_cuda and free is None:
        free, total = free_bytes(recipe, device), total_bytes(recipe, device)
    counted = counted or count_models(recipe, config, device)
    need = without_kv(recipe, config, counted, longest_prompt, device, free or 0)
    if not trains:
        need = _instance_alone(need)
    if free is not None and on_cuda:
        per_token, known = _kv_bytes_on_cuda(recipe, config, device), free
        room = max(0, _room_for_kv(recipe, need, free, total or free))
        one = longest_trajectory(recipe, longest_prompt)

        def advise() -> str:
            model = _Planned(config, counted, longest_prompt, device, asked, trains)
            return _advice(recipe, model, need, known, here=here)

        tokens = _kv_tokens_on_cuda(recipe, need, one, per_token, free, room, advise)
    else:
        text = config.get_text_config()
        per_token = kv_bytes_per_token(text, records_routing=recipe.training.records_routing)
        tokens = kv_tokens(recipe, text, longest_prompt)
    return replace(need, kv=instances * tokens * per_token, kv_tokens=tokens)


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
    room = _room_for_kv(recipe, need if trains else _instance_alone(need), free, total or free)
    tokens = instances_per_device(recipe) * _least_kv_tokens(recipe, longest_trajectory(recipe, longest_prompt))
    return room - tokens * _kv_bytes_on_cuda(recipe, config, device)


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


def base_bytes(recipe: Recipe, counted: CountedModels, device: torch.device) -> int:
    """Returns the bytes of the parameters of the policy: once, and the copies of instances that have their own."""
    policy, dtype, instances = counted.policy, choose_dtype(recipe.model.dtype, device), instances_per_device(recipe)
    parameters = policy.total
    if recipe.engine.type == "vllm":
        parameters += (instances if recipe.runtime.type == "local" else 0) * policy.total
    elif device.type == "cuda" and recipe.model.lora is not None and policy.is_fused:
        parameters += (instances - 1) * policy.in_matrices
    return parameters * dtype.itemsize


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


def _instance_alone(need: Footprint) -> Footprint:
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


def kv_tokens(recipe: Recipe, config: Any, longest_prompt: int) -> int:
    """Returns the KV tokens of an instance on the CPU: its share of the recipe's, or what its rows need under a cap."""
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens // recipe.runtime.instances
    one = longest_trajectory(recipe, longest_prompt)
    per_token = kv_bytes_per_token(config, records_routing=recipe.training.records_routing)
    cap = KV_BYTES_BY_DEFAULT // (per_token * instances_per_device(recipe))
    return max(one, min(engine_rows(recipe) * one, cap))


def _kv_bytes_on_cuda(recipe: Recipe, config: Any, device: torch.device) -> int:
    """Returns the bytes of a token's keys and values on all devices of an instance."""
    text, dtype = config.get_text_config(), choose_dtype(recipe.model.dtype, device)
    return kv_bytes_per_token(text, dtype, records_routing=recipe.training.records_routing) * kv_copies(recipe, text)


def _least_kv_tokens(recipe: Recipe, one: int) -> int:
    """Returns the fewest KV tokens that an instance on CUDA can have: those that the recipe names, or a few rows'.

    `one` is the length of the longest trajectory.
    """
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens // recipe.runtime.instances
    return min(MIN_TRAJECTORIES, engine_rows(recipe)) * one


def _room_for_kv(recipe: Recipe, need: Footprint, free: int, total: int) -> int:
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


def _kv_tokens_on_cuda(
    recipe: Recipe, need: Footprint, one: int, per_token: int, free: int, room: int, advise: Callable[[], str]
) -> int:
    """Returns the KV tokens of one instance: its share of the `room` that is left, at most what its rows can need.

    `one` is the length of the longest trajectory. Raises `RecipeError` with what `advise` returns if too little
    memory is left.
    """
    rows, instances = engine_rows(recipe), instances_per_device(recipe)
    left = room // (per_token * instances)
    named, least = recipe.rollout.kv_tokens is not None, _least_kv_tokens(recipe, one)
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


@dataclass(frozen=True, slots=True)
class _Planned:
    """The model and the memory of a plan, to try other options of its recipe with."""

    config: Any
    counted: CountedModels
    longest_prompt: int
    device: torch.device
    free: int | None  # as `footprint` was given it
    trains: bool

    def fits(self, recipe: Recipe) -> bool:
        """True if the run fits the same memory with other options, as of the engine or of the number of instances."""
        return self._spare(recipe, self.free) >= 0

    def fits_with_share(self, recipe: Recipe, share: float) -> bool:
        """True if the run fits with another `engine.gpu_memory`. On a cluster that changes the memory to plan with."""
        other, free = with_section(recipe, "engine", gpu_memory=share), self.free
        if free is not None and recipe.runtime.type == "ray":
            free = int(free * _device_part(other) / _device_part(recipe))
        return self._spare(other, free) >= 0

    def _spare(self, recipe: Recipe, free: int | None) -> int:
        prompt, device = self.longest_prompt, self.device
        return spare_bytes(recipe, self.config, self.counted, prompt, device, free=free, trains=self.trains)


def _device_part(recipe: Recipe) -> float:
    """Returns the share of a device that an instance on a cluster may use."""
    shares = (recipe.runtime.instance_gpus, recipe.engine.gpu_memory)
    return min([1.0, *(each for each in shares if each is not None)])


def share_limits(recipe: Recipe) -> bool:
    """True if `engine.gpu_memory` sets the memory of an instance on a cluster."""
    if recipe.runtime.type != "ray" or recipe.engine.gpu_memory is None:
        return False
    return _device_part(with_section(recipe, "engine", gpu_memory=None)) > recipe.engine.gpu_memory


def _advice(recipe: Recipe, planned: _Planned, need: Footprint, free: int, *, here: bool) -> str:
    """Returns what to change if too little memory is left for the KV cache. Names nothing that cannot be enough."""
    share = recipe.engine.gpu_memory
    if share is not None:
        shares = [each / 100 for each in range(int(share * 100) + 1, int(MOST_SHARE * 100) + 1)]
        at = bisect_left(shares, True, key=lambda each: planned.fits_with_share(recipe, each))
        if at < len(shares):
            return f"Raise `engine.gpu_memory` (now {share:g}) to at least {shares[at]:g}"
    cut = recipe.engine.type == "vllm" and recipe.runtime.type == "ray"
    if need.one_base > (free / _device_part(recipe) if share_limits(recipe) else free):
        return weights_alone(need) + ", or raise `engine.tensor_parallel`" * cut
    advice = remedies(recipe, planned.longest_prompt, trains=planned.trains, here=here)
    if recipe.engine.type != "vllm" or recipe.runtime.type != "local":
        return advice
    least = _least_options(recipe)
    if not planned.fits(least):
        two = base_bytes(least, planned.counted, planned.device)
        if two > free // 2:  # else long trajectories are the reason
            advice = (
                f"The weights alone take {gib(two)}, because the trainer and vLLM have a copy each: use a larger "
                "device or a smaller model"
            )
    native = with_section(recipe, "engine", type="native", gpu_memory=None)
    without_share = "" if share is None else " without `engine.gpu_memory`"
    for each in (native, with_section(native, "training", checkpointing=True)):
        if planned.fits(each):
            more = "" if each is native else " with `training.checkpointing = true`"
            return f'{advice}. `engine.type = "native"` would fit{more}{" and" * bool(more and share)}{without_share}'
    return advice


def _least_options(recipe: Recipe) -> Recipe:
    """Returns the recipe with the least memory that options other than lengths can lead to."""
    rollout: dict[str, Any] = {"rows": 1, "kv_tokens": None, "prefill_tokens": PREFILL_TOKENS}
    if recipe.paradigm.staleness is None:
        rollout["staleness"] = 0
    lean = with_section(recipe, "rollout", **rollout)
    lean = with_section(lean, "engine", gpu_memory=None)
    lean = with_section(lean, "training", checkpointing=True, micro_tokens=LEAST_MICRO_TOKENS)
    return with_section(lean, "runtime", instances=1 if recipe.model.lora is not None else lean.plan.slots)


def remedies(recipe: Recipe, longest_prompt: int, *, trains: bool = True, here: bool = True) -> str:
    """Returns the options to change if a run does not fit, with their values.

    Without `trains` they are those of an instance alone. Without `here` the device is not one of this machine.
    """
    rollout = recipe.rollout
    micro_tokens = f"`training.micro_tokens` (now {recipe.training.micro_batch_tokens})"
    lower = [
        *[micro_tokens] * (trains and holds_several(recipe, longest_prompt)),
        f"`rollout.rows` (now {recipe.plan.rows})",
        f"`rollout.max_tokens` (now {rollout.max_tokens})",
    ]
    if recipe.plan.staleness and recipe.paradigm.staleness is None:
        cap = "_cap" if recipe.plan.auto else ""
        lower.append(f"`rollout.staleness{cap}` (now {recipe.plan.staleness}: {recipe.num_slots} versions)")
    if rollout.prefill_chunk_tokens > PREFILL_TOKENS:
        lower.append(f"`rollout.prefill_tokens` (now {rollout.prefill_chunk_tokens})")
    if instances_per_device(recipe) > 1:
        lower.insert(0, f"`runtime.instances` (now {recipe.runtime.instances})")
    if rollout.kv_tokens is not None:
        lower.insert(0, f"`rollout.kv_tokens` (now {rollout.kv_tokens}; left out, it is what fits)")
    full = recipe.model.lora is None
    if full and recipe.engine.type == "native" and recipe.runtime.instances > 1 and recipe.num_slots > 1:
        lower.append(f"`runtime.slots` (now {recipe.num_slots} for each instance)")
    checkpointing = ", or set `training.checkpointing = true`" if trains and not recipe.training.checkpointing else ""
    adapters = ", or train adapters, `model.lora = { rank = 16 }`" if full else ""
    free = ", or free memory that other processes hold" if here else ""
    share = recipe.engine.gpu_memory
    begun = "Lower" if share is None else f"Raise `engine.gpu_memory` (now {share:g}), or lower"
    return f"{begun} {', '.join(lower)}{checkpointing}{adapters}{free}"


def weights_alone(need: Footprint) -> str:
    """Returns what to do if not even the weights of the model fit, where no other option helps."""
    return f"The weights alone take {gib(need.one_base)}: use a larger device or a smaller model"


def out_of_memory(recipe: Recipe, need: Footprint, longest_prompt: int, error: BaseException) -> RecipeError:
    """Returns the error for a run whose plan was too low: memory ran out while engines and trainer were made."""
    return RecipeError(
        f"{DOES_NOT_FIT}memory ran out while it was built ({first_line(error)}). Planned were {need}, "
        f"{describe_kv(recipe, need)}; together {gib(need.total)}. {remedies(recipe, longest_prompt)}"
    )


def describe_kv(recipe: Recipe, need: Footprint) -> str:
    """Returns the size of the KV cache as text."""
    each = f" on each of {recipe.runtime.instances} instances" if instances_per_device(recipe) > 1 else ""
    return f"KV {gib(need.kv)} for {need.kv_tokens:,} tokens{each}"
