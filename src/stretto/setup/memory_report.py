"""The memory plan as `stretto check` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stretto.engines.host_memory import usable_memory
from stretto.models.loading import load_config
from stretto.models.lora_options import LoraOptions
from stretto.models.tiny import tiny_config_of
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import Recipe
from stretto.setup.cluster_devices import devices_taken
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import CUDA, choose_device, choose_dtype, describe_device, free_bytes, with_section
from stretto.setup.device_plan import described_placement, fit_in_one_process, fit_on_cluster
from stretto.setup.memory import footprint, free_for_instance, is_sharded, rank_footprint
from stretto.setup.memory_advice import weights_alone
from stretto.setup.memory_needs import Footprint, describe_kv, instances_per_device
from stretto.setup.memory_sizes import gib, longest_trajectory
from stretto.setup.prefill_chunk_size import describe_prefill_tokens, with_prefill_tokens

FEW = 0.25  # of the rows


def describe_memory(
    recipe: Recipe,
    longest_prompt: int | None = None,
    *,
    config: Any = None,
    counted: CountedModels | None = None,
    planned: PlannedDevices | None = None,
    asked: Recipe | None = None,
) -> str:
    """Returns the plan of the run and its memory. `longest_prompt` None: prompts are as long as completions.

    `config` is that of the model; None: it is loaded. `counted` are the models of the recipe; None: they are counted
    here. `planned` are devices that are not here; None: those of this machine. `asked` is the recipe with each `auto`
    as the user wrote it, to plan a cluster instead; None: `recipe` has it so. Raises `RecipeError` if the run does not
    fit on GPUs. On the CPU that is a warning in the text: the system may give a run more memory than is free, and the
    estimate is rough.
    """
    plan, device = recipe.plan, choose_device(recipe.runtime.device) if planned is None else CUDA
    if config is None:
        config = tiny_config_of(recipe.model.path) if recipe.model.is_tiny else load_config(recipe.model.path)
    counted = counted or count_models(recipe, config, device)
    longest = longest_prompt or recipe.rollout.max_tokens
    bound = f"at most {plan.staleness} (auto)" if plan.auto else str(plan.staleness)
    dtype = str(choose_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    where = f"{planned}, which need not be here" if planned is not None else describe_device(device)
    free = ""
    if device.type == "cuda" and planned is None:
        free = f", {gib(free_bytes(recipe, device))} free"
    elif device.type == "cpu" and recipe.runtime.type == "local":
        free = f", {gib(usable_memory())} in this machine"
    slots, count = f"{recipe.num_slots} version slots", recipe.runtime.instances
    started = f" of {plan.batch + plan.reserve_groups} x {plan.members} that are started" if plan.redundant else ""
    lines = [
        f"# {plan.paradigm.name}: K = {bound}, {plan.in_flight} groups in flight, {plan.rows} rows, "
        f"{f'{count} instances of {slots}' if count > 1 else slots}, "
        f"{plan.updates} updates of {plan.batch} x {plan.group_size} trajectories{started}",
        f"# device{'s' if planned is not None else ''}: {where}, weights in {dtype}{free}",
    ]
    if recipe.runtime.type == "ray":
        lines += _on_cluster(recipe, config, counted, longest, device, planned)
    else:
        lines += _in_one_process(recipe, config, counted, longest, device, planned, asked)
    return "\n".join(lines)


def _in_one_process(
    recipe: Recipe,
    config: Any,
    counted: CountedModels,
    longest_prompt: int,
    device: torch.device,
    planned: PlannedDevices | None,
    asked: Recipe | None,
) -> list[str]:
    if planned is None:
        need = footprint(recipe, config, longest_prompt, device, counted=counted)
    else:
        need = fit_in_one_process(recipe, config, longest_prompt, planned, asked=asked, counted=counted)
    lines = [
        f"# memory: {need}, {describe_kv(recipe, need)}; together {gib(need.total)}",
        *_few_answers(recipe, need, longest_prompt),
    ]
    if planned is not None:
        lines.append(f"# fits {planned}: a run in one process uses 1 of {planned.count} devices")
    if device.type == "cpu" and need.total > usable_memory():
        lines.append(f"# warning: {_too_large(recipe, config, counted, longest_prompt, need, usable_memory())}")
    return lines


def _few_answers(recipe: Recipe, need: Footprint, longest_prompt: int) -> Iterator[str]:
    """Yields a note if the KV cache of an instance has room for less than `FEW` of its rows at full length."""
    one = longest_trajectory(recipe, longest_prompt)
    rows, held = -(-recipe.plan.rows // recipe.runtime.instances), need.kv_tokens // one
    if held < FEW * rows:
        trained = recipe.runtime.type == "local" and not recipe.training.checkpointing
        less = ", or `training.checkpointing = true`," if trained else ""
        yield (
            f"# note: the KV cache has room for {held:,} trajectories of full length ({one:,} tokens) at once, and "
            f"there are {rows:,} rows: the others wait, and rollout is slower. More memory{less} makes room"
        )


def _too_large(
    recipe: Recipe, config: Any, counted: CountedModels, longest_prompt: int, need: Footprint, host: int
) -> str:
    """Returns a sentence on a plan for the CPU that is larger than the memory `host`, with what would lower it."""

    def total(section: str, **values: Any) -> int:
        changed, cpu = with_section(recipe, section, **values), torch.device("cpu")
        models = counted if changed.model == recipe.model else None  # adapters have other parameters
        return footprint(changed, config, longest_prompt, cpu, counted=models).total

    said = f"the plan is larger than the memory of this machine, {gib(need.total)} of {gib(host)}"
    if need.one_base > host:
        return f"{said}. {weights_alone(need)}"
    one = longest_trajectory(recipe, longest_prompt)
    tokens = recipe.training.micro_batch_tokens // 2
    while tokens > one and total("training", micro_tokens=tokens) > host:
        tokens //= 2
    kv_tokens = max(one, need.kv_tokens // 2) * instances_per_device(recipe)
    plans = {
        f"training.micro_tokens={tokens}": total("training", micro_tokens=tokens),
        "training.checkpointing=true": total("training", checkpointing=True),
        f"rollout.kv_tokens={kv_tokens}": total("rollout", kv_tokens=kv_tokens),
        "model.lora.rank=16": total("model", lora=recipe.model.lora or LoraOptions(rank=16)),
    }
    smaller = sorted((plan, change) for change, plan in plans.items() if plan < need.total)
    advice = ", ".join(f"{gib(plan)} with `--set {change}`" for plan, change in smaller) or "only with a smaller model"
    return (
        f"{said}. The estimate is rough, so the run is not refused; if memory runs out, the system ends it. Smaller "
        f"plans: {advice}"
    )


def _on_cluster(
    recipe: Recipe,
    config: Any,
    counted: CountedModels,
    longest_prompt: int,
    device: torch.device,
    planned: PlannedDevices | None,
) -> list[str]:
    """Describes an instance and the trainer apart: each has its own device, or a share of one."""
    asked, free = recipe, free_for_instance(recipe, device, planned)
    recipe = with_prefill_tokens(asked, config, longest_prompt, device, counted=counted, free=free, trains=False)
    if planned is None:
        need = footprint(recipe, config, longest_prompt, device, counted=counted, free=free, trains=False)
        rank = rank_footprint(recipe, config, longest_prompt, device, counted=counted)
    else:
        need, rank = fit_on_cluster(recipe, config, longest_prompt, planned, counted=counted)
    ranks, over = recipe.runtime.trainers, recipe.engine.tensor_parallel
    lines = [
        f"# memory of an instance: {need}, {describe_kv(recipe, need)}; together {gib(need.total)}"
        + (f" on {over} devices" if over > 1 else ""),
        *_few_answers(recipe, need, longest_prompt),
        *(f"# {line}" for line in describe_prefill_tokens(asked, recipe)),
        f"# memory of {f'each of {ranks} ranks of ' if ranks > 1 else ''}the trainer: {rank}; "
        f"together {gib(rank.total)}" + (f", its layers cut over {ranks} ranks" if is_sharded(recipe, counted) else ""),
    ]
    if planned is not None:
        taken = devices_taken(recipe)
        lines.append(f"# fits {planned}: {described_placement(recipe)} take {taken} of {planned.count} devices")
    return lines
