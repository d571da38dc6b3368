"""Checks of a recipe's engine: keys that have no effect with it, and options that it cannot serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.models.mixture_configs import is_known_mixture

if TYPE_CHECKING:
    from stretto.core.plan import Plan
    from stretto.recipe.schema import Recipe

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # of vLLM, which raises a lower one without an error; 0 is greedy
MAX_RANK = 512  # of an adapter, in vLLM
NO_EVALUATION = "set `evaluation.every = 0`"  # not `prompts = 0`, which is refused beside an `every`
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


def refused_mixture(path: str) -> str:
    """Returns the reason why vLLM does not serve a mixture of experts."""
    return (
        f'`engine.type = "vllm"` is refused with `model.path = {path!r}`, a mixture of experts: vLLM and the trainer '
        'may route a token to different experts; use "native"'
    )


def impossible_full_versions(recipe: Recipe, plan: Plan) -> Iterable[str]:
    """The reason why instances with one version each cannot hold those of the run; none if they can.

    More instances would not help a mixture of experts, which vLLM does not serve, so that is the reason if it is known.
    """
    if recipe.engine.type != "vllm" or recipe.model.lora is not None or recipe.runtime.instances >= plan.slots:
        return
    if is_known_mixture(recipe.model.path):
        yield refused_mixture(recipe.model.path)
        return
    yield (
        f'`runtime.instances = {recipe.runtime.instances}` is too few: with `engine.type = "vllm"` an instance holds '
        f"one version of full weights, and the run needs {plan.slots} at once{_counted(plan)}; use at least "
        f"{plan.slots} instances, {fewer_versions(plan, recipe.runtime.instances)}or train adapters, "
        "`model.lora = { rank = 16 }`"
    )


def _counted(plan: Plan) -> str:
    """Returns the versions of a run in parentheses: its staleness, and the one of evaluation."""
    evaluated = ", and one more to evaluate beside training" if plan.evaluate_every else ""
    return f" (K = {plan.staleness}{evaluated})"


def fewer_versions(plan: Plan, held: int) -> str:
    """Returns the options that lower the versions of a run to those `held` at once, each with a comma after it.

    Empty if none do, such as with a staleness that the paradigm fixes.
    """
    options = []
    evaluated = int(plan.evaluate_every > 0)
    adjustable = plan.paradigm.staleness is None and plan.paradigm.pinned
    if adjustable and held - 1 - evaluated >= 0:
        options.append(_lower_staleness(plan, held - 1 - evaluated))
    if evaluated and held >= plan.slots - 1:
        options.append(NO_EVALUATION)
    elif adjustable and not options and evaluated and held >= 1:
        options.append(f"{_lower_staleness(plan, held - 1)} and {NO_EVALUATION}")
    return "".join(f"{each}, " for each in options)


def _lower_staleness(plan: Plan, most: int) -> str:
    if most == 0:
        return "set `rollout.staleness = 0`"
    return f"lower `rollout.staleness{'_cap' * plan.auto}` to at most {most}"
