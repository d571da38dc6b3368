"""The plan of a run for devices that are not here: whether it fits, and how many of them would do.

One process uses one device. On a cluster, instances and ranks of the trainer have devices of their own. If one of them
does not fit, these options make it smaller: `engine.tensor_parallel` cuts an instance of vLLM over more devices,
`runtime.slots` lets an instance hold fewer versions of full weights, `runtime.trainers` shards full weights over more
ranks, `training.checkpointing` keeps fewer activations, and `training.micro_tokens` makes micro-batches smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import PREFILL_TOKENS, Recipe
from stretto.setup.cluster_devices import devices_taken, instance_gpus, reward_model_gpus
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import CUDA, planned_bytes, with_section
from stretto.setup.memory import footprint, free_for_instance, rank_footprint
from stretto.setup.memory_advice import DOES_NOT_FIT, MOST_SHARE, weights_alone
from stretto.setup.memory_needs import Footprint, share_limits
from stretto.setup.memory_sizes import gib, holds_several, longest_trajectory
from stretto.setup.vllm_engines import fitting_parallel
from stretto.training.options import LEAST_MICRO_TOKENS

MOST_RANKS = 64  # of a trainer, that are tried
SHORT_TOKENS = 256  # a completion that is never too long
MOST_GIB = 1024  # of a device, that are tried if no number of the planned ones would do


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model of all recipes that are tried. They differ in nothing that changes its parameters."""

    config: Any
    counted: CountedModels
    longest_prompt: int  # tokens


def fit_in_one_process(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    planned: PlannedDevices,
    *,
    asked: Recipe | None = None,
    counted: CountedModels | None = None,
) -> Footprint:
    """Plans a run in one process, which uses one of the devices. Raises `RecipeError` if it does not fit.

    `asked` is the recipe with each `auto` as the user wrote it, because it is another number on a cluster; None:
    `recipe` has it so. `counted` are its models; None: they are counted here.
    """
    counted, free = counted or count_models(recipe, config, CUDA), planned_bytes(recipe, planned)
    try:
        return footprint(recipe, config, longest_prompt, CUDA, counted=counted, free=free, here=False)
    except RecipeError as error:
        why = "a run in one process uses one device, so more of them do not help it"
        moved = with_section(recipe if asked is None else asked, "runtime", type="ray")
        would_do = _would_do(moved, PlannedModel(config, counted, longest_prompt), planned, why)
        raise RecipeError(f"{error}. {would_do}") from error


def fit_on_cluster(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    planned: PlannedDevices,
    *,
    counted: CountedModels | None = None,
) -> tuple[Footprint, Footprint]:
    """Plans an instance and a rank of the trainer. Raises `RecipeError` if they, or all of them, do not fit.

    `counted` are the models of the recipe; None: they are counted here.
    """
    model, problems = PlannedModel(config, counted or count_models(recipe, config, CUDA), longest_prompt), []
    instance = rank = None
    try:
        instance = _instance(recipe, model, planned)
    except RecipeError as error:
        problems.append(f"an instance: {str(error).removeprefix(DOES_NOT_FIT)}")
    try:
        rank = _rank(recipe, model, planned)
    except RecipeError as error:
        problems.append(f"a rank of the trainer: {error}")
    if (taken := devices_taken(recipe)) > planned.count:
        problems.append(f"{described_placement(recipe)} take {taken} devices")
    if problems or instance is None or rank is None:
        raise RecipeError(
            f"the recipe does not fit {planned}: {'; '.join(problems)}. {_would_do(recipe, model, planned)}"
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


def _instance(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> Footprint:
    free, counted = free_for_instance(recipe, CUDA, planned), model.counted
    return footprint(
        recipe, model.config, model.longest_prompt, CUDA, counted=counted, free=free, trains=False, here=False
    )


def _rank(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> Footprint:
    share = 1.0 if recipe.runtime.trainer_gpus is None else min(1.0, recipe.runtime.trainer_gpus)
    free = int(planned_bytes(recipe, planned) * share)
    need = rank_footprint(recipe, model.config, model.longest_prompt, CUDA, counted=model.counted, free=free)
    if need.total > free:
        lower = f"`rollout.max_tokens` (now {recipe.rollout.max_tokens})"
        if holds_several(recipe, model.longest_prompt):
            lower = f"`training.micro_tokens` (now {recipe.training.micro_batch_tokens})"
        checkpointing = "" if recipe.training.checkpointing else ", or set `training.checkpointing = true`"
        full = ", or raise `runtime.trainers`, or train adapters, `model.lora = { rank = 16 }`"
        adapters = "" if recipe.model.lora is not None else full
        advice = f"Lower {lower}{checkpointing}{adapters}"
        if recipe.model.lora is not None and need.base > free:
            advice = weights_alone(need)
        raise RecipeError(f"{gib(free)} of the device are free; {need}; together {gib(need.total)}. {advice}")
    return need


def _would_do(recipe: Recipe, model: PlannedModel, planned: PlannedDevices, why: str = "") -> str:
    """Returns a sentence on how many devices of this size would do, and with which options."""
    begun = f"{why[:1].upper()}{why[1:]}; on a cluster" if why else ""
    raised = _with_enough_share(recipe, model, planned)
    found = smallest_fit(raised, model, planned)
    if found is not None:
        said = _devices(recipe, found, planned, moved=bool(why))
        fewer = fewer_instances(found, planned)
        on_less = f"; {planned.count} would do with `runtime.instances = {fewer}`" if fewer else ""
        return f"{begun} {said}{on_less}" if begun else f"{said}{on_less}"
    said = f"no number of devices of {planned.gib:g} GiB would do"
    said = f"{begun}, too, {said}" if begun else f"{said[:1].upper()}{said[1:]}"
    larger = smallest_size(raised, model, planned)
    found = None if larger is None else smallest_fit(raised, model, larger)
    if larger is None or found is None:
        return f"{said}. {_too_large(raised, model, planned)}"
    return f"{said}. {_devices(recipe, found, larger, moved=bool(why))}"


def _with_enough_share(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> Recipe:
    """Returns the recipe with the least `engine.gpu_memory` that an instance fits in, or the most if none is enough.

    The recipe itself if an instance fits in its own share, or if the share is not what limits it.
    """
    own = recipe.engine.gpu_memory
    if own is None or not share_limits(recipe) or own >= MOST_SHARE:
        return recipe
    hundredths = range(int(own * 100) + 1, int(MOST_SHARE * 100) + 1)
    shares = [recipe, *(with_section(recipe, "engine", gpu_memory=each / 100) for each in hundredths)]
    at = bisect_left(shares, True, key=lambda each: _fits(_instance, each, model, planned))
    return shares[min(at, len(shares) - 1)]


def _too_large(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> str:
    """Returns a sentence on the option that is too large for every size that is tried; on the sizes if it is none."""
    most = PlannedDevices(planned.count, float(max(MOST_GIB, planned.gib)))
    rollout, lengths = recipe.rollout, {"rollout": recipe.rollout.max_tokens}
    lengths["evaluation"] = recipe.evaluation.max_tokens or 0
    longest = max(lengths, key=lambda section: lengths[section])
    short = with_section(recipe, longest, max_tokens=SHORT_TOKENS)
    tried = {
        f"rollout.prefill_tokens = {rollout.prefill_chunk_tokens}": (
            with_section(recipe, "rollout", prefill_tokens=PREFILL_TOKENS),
            model,
        ),
        f"rollout.kv_tokens = {rollout.kv_tokens}": (with_section(recipe, "rollout", kv_tokens=None), model),
        f"rollout.rows = {recipe.plan.rows}": (
            with_section(recipe, "rollout", rows=recipe.runtime.instances),
            model,
        ),
        f"{longest}.max_tokens = {lengths[longest]}": (
            short,
            replace(model, longest_prompt=min(model.longest_prompt, SHORT_TOKENS)),
        ),
    }
    for option, (other, own) in tried.items():
        *_, lean = _trainings(other, own.longest_prompt)
        if _smallest(lean, own, most) is not None:
            return f"`{option}` is too large for devices of {most.gib:g} GiB, too: lower it"
    return f"Devices of {most.gib:g} GiB would not do, either: use a smaller model"


def _devices(recipe: Recipe, found: Recipe, planned: PlannedDevices, *, moved: bool) -> str:
    """Returns a sentence on how many devices `found` takes, and how it differs from the recipe."""
    changed = ['`runtime.type = "ray"`'] if moved else []
    if found.engine.gpu_memory != recipe.engine.gpu_memory:
        changed.append(f"`engine.gpu_memory = {found.engine.gpu_memory:g}`")
    if found.engine.tensor_parallel != recipe.engine.tensor_parallel:
        changed.append(f"`engine.tensor_parallel = {found.engine.tensor_parallel}`")
    if found.runtime.slots != recipe.runtime.slots:
        changed.append(f"`runtime.slots = {found.runtime.slots}`")
    if found.runtime.trainers != recipe.runtime.trainers:
        changed.append(f"`runtime.trainers = {found.runtime.trainers}`")
    if found.training.checkpointing != recipe.training.checkpointing:
        changed.append("`training.checkpointing = true`")
    if found.training.micro_tokens != recipe.training.micro_tokens:
        changed.append(f"`training.micro_tokens = {found.training.micro_tokens}`")
    options = f", with {', '.join(changed)}" if changed else ""
    return f"{devices_taken(found)} devices of {planned.gib:g} GiB would do{options}"


def fewer_instances(recipe: Recipe, planned: PlannedDevices) -> int | None:
    """Returns the most instances with which the recipe takes no more than the planned devices.

    None if it takes no more as it is, or if so few instances could not hold the versions of the run.
    """
    if devices_taken(recipe) <= planned.count:
        return None
    least = -(-recipe.plan.slots // recipe.num_slots)
    counts = range(recipe.runtime.instances - 1, least - 1, -1)
    fewer = (with_section(recipe, "runtime", instances=count) for count in counts)
    return next((each.runtime.instances for each in fewer if devices_taken(each) <= planned.count), None)


def smallest_fit(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> Recipe | None:
    """Returns the recipe with the options that fit on the fewest devices; None if none do.

    Checkpointing and small micro-batches cost time, so they are changed only if nothing fits `planned` without them.
    """
    found = []
    for each in _trainings(recipe, model.longest_prompt):
        fitting = _smallest(each, model, planned)
        if fitting is not None:
            found.append(fitting)
            if devices_taken(fitting) <= planned.count:
                break
    return min(found, key=devices_taken, default=None)


def smallest_size(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> PlannedDevices | None:
    """Returns devices of the least size, in whole GiB, of which some number would do; None if there is no such size."""
    *_, lean = _trainings(recipe, model.longest_prompt)
    sizes = range(int(planned.gib) + 1, MOST_GIB + 1)
    larger = [PlannedDevices(planned.count, float(size)) for size in sizes]
    at = bisect_left(larger, True, key=lambda each: _smallest(lean, model, each) is not None)
    return larger[at] if at < len(larger) else None


def _trainings(recipe: Recipe, longest_prompt: int) -> Iterator[Recipe]:
    """Yields the recipe, and then the same with less and less memory for activations."""
    yield recipe
    if not recipe.training.checkpointing:
        recipe = with_section(recipe, "training", checkpointing=True)
        yield recipe
    least = max(LEAST_MICRO_TOKENS, longest_trajectory(recipe, longest_prompt))  # smaller ones hold one trajectory, too
    while (tokens := recipe.training.micro_batch_tokens) > least:
        recipe = with_section(recipe, "training", micro_tokens=max(tokens // 2, LEAST_MICRO_TOKENS))
        yield recipe


def _smallest(recipe: Recipe, model: PlannedModel, planned: PlannedDevices) -> Recipe | None:
    """The same with the fewest devices for an instance, and the fewest ranks of the trainer."""
    instances = _instances(recipe, model.config)
    found = next((each for each in instances if _fits(_instance, each, model, planned)), None)
    if found is None:
        return None
    first = recipe.runtime.trainers
    ranks = range(first, max(MOST_RANKS, first) + 1) if recipe.model.lora is None else range(first, first + 1)
    sharded = [with_section(found, "runtime", trainers=each) for each in ranks]
    at = bisect_left(sharded, True, key=lambda each: _fits(_rank, each, model, planned))
    return sharded[at] if at < len(sharded) else None


def _instances(recipe: Recipe, config: Any) -> Iterator[Recipe]:
    """Yields the recipe, and then the same with less and less memory for an instance on one device."""
    if recipe.engine.type == "vllm":
        own = recipe.engine.tensor_parallel
        cut = [each for each in fitting_parallel(config.get_text_config()) if each >= own]
        yield from (with_section(recipe, "engine", tensor_parallel=each) for each in cut)
        return
    yield recipe
    if recipe.model.lora is None:
        least = -(-recipe.plan.slots // recipe.runtime.instances)  # all instances together hold the versions of the run
        fewer = range(recipe.num_slots - 1, least - 1, -1)
        yield from (with_section(recipe, "runtime", slots=each) for each in fewer)


def _fits(
    plan: Callable[[Recipe, PlannedModel, PlannedDevices], Footprint],
    recipe: Recipe,
    model: PlannedModel,
    planned: PlannedDevices,
) -> bool:
    try:
        plan(recipe, model, planned)
    except RecipeError:
        return False
    return True
