"""The plan of a run for devices that are not here: whether it fits, and how many of them would do.

One process uses one device. On a cluster, instances and ranks of the trainer have devices of their own. If one of them
does not fit, these options make it smaller: `engine.tensor_parallel` cuts an instance of vLLM over more devices,
`runtime.trainers` shards full weights over more ranks, and `training.checkpointing` keeps fewer activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import Recipe
from stretto.setup.cluster_devices import devices_taken, instance_gpus, reward_model_gpus
from stretto.setup.device import CUDA, planned_bytes, with_section
from stretto.setup.memory import Footprint, footprint, free_for_instance, rank_footprint
from stretto.setup.memory_sizes import gib
from stretto.setup.vllm_engines import fitting_parallel

MOST_RANKS = 64  # of a trainer, that are tried


def fit_in_one_process(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> Footprint:
    """Plans a run in one process, which uses one of the devices. Raises `RecipeError` if it does not fit."""
    try:
        return footprint(recipe, config, longest_prompt, CUDA, free=planned_bytes(recipe, planned), here=False)
    except RecipeError as error:
        why = "a run in one process uses one device, so more of them do not help it"
        moved = with_section(recipe, "runtime", type="ray")
        raise RecipeError(f"{error}. {_would_do(moved, config, longest_prompt, planned, why)}") from error


def fit_on_cluster(
    recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices
) -> tuple[Footprint, Footprint]:
    """Plans an instance and a rank of the trainer. Raises `RecipeError` if they, or all of them, do not fit."""
    problems = []
    instance = rank = None
    try:
        instance = _instance(recipe, config, longest_prompt, planned)
    except RecipeError as error:
        problems.append(f"an instance: {error}")
    try:
        rank = _rank(recipe, config, longest_prompt, planned)
    except RecipeError as error:
        problems.append(f"a rank of the trainer: {error}")
    if (taken := devices_taken(recipe)) > planned.count:
        problems.append(f"{described_placement(recipe)} take {taken} devices")
    if problems or instance is None or rank is None:
        raise RecipeError(
            f"the recipe does not fit {planned}: {'; '.join(problems)}. "
            f"{_would_do(recipe, config, longest_prompt, planned)}"
        )
    return instance, rank


def described_placement(recipe: Recipe) -> str:
    """Returns how many devices each part of a run on a cluster asks for, as text."""
    runtime = recipe.runtime
    ranks = 1.0 if runtime.trainer_gpus is None else runtime.trainer_gpus
    parts = [
        f"`runtime.instances = {runtime.instances}` with {instance_gpus(recipe):g} each",
        f"`runtime.trainers = {runtime.trainers}` with {ranks:g} each",
    ]
    if models := reward_model_gpus(recipe):
        parts.append(f"{models} reward models with 1 each")
    return " and ".join(parts)


def _instance(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> Footprint:
    free = free_for_instance(recipe, CUDA, planned)
    return footprint(recipe, config, longest_prompt, CUDA, free=free, trains=False, here=False)


def _rank(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> Footprint:
    share = 1.0 if recipe.runtime.trainer_gpus is None else min(1.0, recipe.runtime.trainer_gpus)
    free = int(planned_bytes(recipe, planned) * share)
    need = rank_footprint(recipe, config, longest_prompt, CUDA, free=free)
    if need.total > free:
        lower = f"`training.micro_tokens` (now {recipe.training.micro_batch_tokens})"
        lower += f" or `rollout.max_tokens` (now {recipe.rollout.max_tokens})"
        checkpointing = "" if recipe.training.checkpointing else ", or set `training.checkpointing = true`"
        adapters = "" if recipe.model.lora is not None else ", or train adapters, `model.lora = { rank = 16 }`"
        raise RecipeError(
            f"{gib(free)} of the device are free; {need}; together {gib(need.total)}. "
            f"Lower {lower}{checkpointing}{adapters}"
        )
    return need


def _would_do(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices, why: str = "") -> str:
    """Returns a sentence on how many devices of this size would do, and with which options."""
    begun = f"{why[:1].upper()}{why[1:]}; on a cluster" if why else ""
    found = smallest_fit(recipe, config, longest_prompt, planned)
    if found is None:
        said = "no number of devices of this size would do"
        return f"{begun}, too, {said}" if begun else f"{said[:1].upper()}{said[1:]}"
    changed = ['`runtime.type = "ray"`'] if why else []
    if found.engine.tensor_parallel != recipe.engine.tensor_parallel:
        changed.append(f"`engine.tensor_parallel = {found.engine.tensor_parallel}`")
    if found.runtime.trainers != recipe.runtime.trainers:
        changed.append(f"`runtime.trainers = {found.runtime.trainers}`")
    if found.training.checkpointing != recipe.training.checkpointing:
        changed.append("`training.checkpointing = true`")
    options = f", with {', '.join(changed)}" if changed else ""
    said = f"{devices_taken(found)} devices of {planned.gib:g} GiB would do{options}"
    return f"{begun} {said}" if begun else said


def smallest_fit(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> Recipe | None:
    """Returns the recipe with the options that fit on the fewest devices; None if none do.

    Checkpointing costs time, so it is changed only if nothing fits `planned` without it.
    """
    plain = _smallest(recipe, config, longest_prompt, planned)
    if recipe.training.checkpointing or (plain is not None and devices_taken(plain) <= planned.count):
        return plain
    lean = _smallest(with_section(recipe, "training", checkpointing=True), config, longest_prompt, planned)
    found = [each for each in (plain, lean) if each is not None]
    return min(found, key=devices_taken, default=None)


def _smallest(recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> Recipe | None:
    """The same with the fewest devices for an instance, and the fewest ranks of the trainer."""
    parallel: Sequence[int] = (1,)
    if recipe.engine.type == "vllm":
        own = recipe.engine.tensor_parallel
        parallel = [each for each in fitting_parallel(config.get_text_config()) if each >= own]
    first = recipe.runtime.trainers
    ranks = range(first, MOST_RANKS + 1) if recipe.model.lora is None else range(first, first + 1)
    cut = (with_section(recipe, "engine", tensor_parallel=each) for each in parallel)
    found = next((each for each in cut if _fits(_instance, each, config, longest_prompt, planned)), None)
    if found is None:
        return None
    sharded = (with_section(found, "runtime", trainers=each) for each in ranks)
    return next((each for each in sharded if _fits(_rank, each, config, longest_prompt, planned)), None)


def _fits(plan: Any, recipe: Recipe, config: Any, longest_prompt: int, planned: PlannedDevices) -> bool:
    try:
        plan(recipe, config, longest_prompt, planned)
    except RecipeError:
        return False
    return True
