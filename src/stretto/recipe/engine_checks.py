"""Checks of a recipe's engine: keys that have no effect with it, and options that it cannot serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.core.plan import Plan
    from stretto.recipe.schema import Recipe

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # of vLLM, which raises a lower one without an error; 0 is greedy
MAX_RANK = 512  # of an adapter, in vLLM
OR_NATIVE = '`engine.type = "native"`'


def engine_without_effect(recipe: Recipe) -> dict[tuple[str, str], str]:
    """The keys that have no effect with the recipe's engine, each with the reason."""
    found: dict[tuple[str, str], str] = {}
    if recipe.engine.type == "native":
        for name in ("tensor_parallel", "gpu_memory"):
            found["engine", name] = (
                f'`engine.{name}` has no effect with {OR_NATIVE}; choose `type = "vllm"`, or leave it out'
            )
    elif recipe.model.lora is None:
        found["runtime", "slots"] = (
            f'`runtime.slots = {recipe.runtime.slots}` has no effect: with `engine.type = "vllm"` an instance holds '
            "one version of full weights; leave it out, or train adapters, `model.lora = { rank = 16 }`"
        )
    return found


def impossible_engine(recipe: Recipe) -> Iterable[str]:
    """The reasons why the engine cannot run the recipe, one sentence each."""
    yield from _idle_gpus(recipe)
    if recipe.engine.type != "vllm":
        return
    rollout, evaluation, lora = recipe.rollout, recipe.evaluation, recipe.model.lora
    if rollout.paradigm == "partial":
        yield (
            '`rollout.paradigm = "partial"` is refused with `engine.type = "vllm"`, which cannot continue trajectories '
            f"under new weights; choose another paradigm, or {OR_NATIVE}"
        )
    for name, off in (("top_p", 1.0), ("min_p", 0.0)):
        if (got := getattr(rollout, name)) != off and not rollout.top_k:
            yield (
                f'`rollout.{name} = {got}` is refused with `engine.type = "vllm"`: training needs the tokens that it '
                "leaves of each distribution, which vLLM tells only with a `top_k`; set `rollout.top_k`, leave it out, "
                f"or choose {OR_NATIVE}"
            )
    for key, value in (("rollout", rollout.temperature), ("evaluation", evaluation.temperature or 0.0)):
        if value > MAX_TEMPERATURE:
            yield (
                f'`{key}.temperature = {value:g}` is refused with `engine.type = "vllm"`, which samples at most at '
                f"{MAX_TEMPERATURE:g}; lower it, or choose {OR_NATIVE}"
            )
        if 0 < value < MIN_TEMPERATURE:
            yield (
                f'`{key}.temperature = {value:g}` is refused with `engine.type = "vllm"`, which would sample at '
                f"{MIN_TEMPERATURE:g}; raise it, or choose {OR_NATIVE}"
            )
    if lora is not None and lora.rank > MAX_RANK:
        yield (
            f'`model.lora.rank = {lora.rank}` is refused with `engine.type = "vllm"`, which serves adapters up to '
            f"rank {MAX_RANK}; lower it, or choose {OR_NATIVE}"
        )
    if recipe.runtime.deterministic:
        yield (
            '`runtime.deterministic = true` is refused with `engine.type = "vllm"`, whose log-probabilities depend on '
            f"what else runs; leave it out, or choose {OR_NATIVE}"
        )
    gpus = recipe.runtime.instance_gpus
    if recipe.runtime.type == "ray" and gpus is not None and gpus < recipe.engine.tensor_parallel > 1:
        yield (
            f"`runtime.instance_gpus = {gpus:g}` is less than `engine.tensor_parallel = "
            f"{recipe.engine.tensor_parallel}`, the devices that one instance cuts the model over; leave it out"
        )
    if recipe.engine.tensor_parallel > 1 and recipe.runtime.type == "local":
        yield (
            f"`engine.tensor_parallel = {recipe.engine.tensor_parallel}` needs a cluster, where an instance has "
            'devices of its own; choose `runtime.type = "ray"`, or leave it out'
        )


def _idle_gpus(recipe: Recipe) -> Iterable[str]:
    """The reasons why GPUs that are reserved on a cluster would do nothing, one sentence each."""
    runtime, used = recipe.runtime, recipe.engine.tensor_parallel
    if runtime.type != "ray":
        return
    if runtime.instance_gpus is not None and runtime.instance_gpus > used:
        yield (
            f"`runtime.instance_gpus = {runtime.instance_gpus:g}` is more than the {used} that an instance uses; leave "
            "it out. `engine.tensor_parallel` cuts an instance of vLLM over several"
        )
    if runtime.trainer_gpus is not None and runtime.trainer_gpus > 1:
        yield (
            f"`runtime.trainer_gpus = {runtime.trainer_gpus:g}` is more than the 1 that a rank uses; leave it out, and "
            "set `runtime.trainers` for several ranks"
        )


def impossible_full_versions(recipe: Recipe, plan: Plan) -> Iterable[str]:
    """The reason why instances with one version each cannot hold those of the run; none if they can."""
    if recipe.engine.type == "vllm" and recipe.model.lora is None and recipe.runtime.instances < plan.slots:
        yield (
            f'`runtime.instances = {recipe.runtime.instances}` is too few: with `engine.type = "vllm"` an instance '
            f"holds one version of full weights, and the run needs {plan.slots} at once (K = {plan.staleness}); use at "
            f"least {plan.slots} instances, lower `rollout.staleness`, or train adapters, `model.lora = "
            "{ rank = 16 }`"
        )
