"""The CPUs and GPUs that instances and trainer ask a cluster for. Does not import Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.recipe.schema import Recipe
from stretto.setup.scorers import scorers_of


def gpus_of(asked: float | None, recipe: Recipe) -> float:
    """Returns the GPUs of one actor: what was asked for, or one if the run is on CUDA."""
    return asked if asked is not None else float(recipe.runtime.device == "cuda")


def instance_gpus(recipe: Recipe) -> float:
    """Returns the GPUs of one instance: what was asked for, or as many as its engine cuts the model over."""
    return gpus_of(recipe.runtime.instance_gpus, recipe) * (
        recipe.engine.tensor_parallel if recipe.runtime.instance_gpus is None else 1
    )


def shortage(recipe: Recipe, total: Mapping[str, float]) -> str | None:
    """Returns a sentence on what instances and ranks ask for beyond what a cluster has; None if all of it fits."""
    runtime = recipe.runtime
    wanted = {
        "CPU": (runtime.instance_cpus, runtime.trainer_cpus),
        "GPU": (instance_gpus(recipe), gpus_of(runtime.trainer_gpus, recipe)),
    }
    for kind, (instance, trainer) in wanted.items():
        asked, has = runtime.instances * instance + runtime.trainers * trainer, total.get(kind, 0)
        if asked > has:
            name = kind.lower()
            return (
                f"`runtime.instances = {runtime.instances}` with `instance_{name}s = {instance:g}` and "
                f"`trainers = {runtime.trainers}` with `trainer_{name}s = {trainer:g}` ask for {asked:g} {kind}s, and "
                f"there are {has:g}"
            )
    return None


def reward_model_gpus(recipe: Recipe) -> int:
    """Returns the GPUs of the reward models of a run on a cluster: each that is not on the CPU has one of its own."""
    scorers = [each for task in recipe.tasks for each in scorers_of(task).values()]
    return sum(isinstance(each, RewardModelOptions) and each.device not in ("cpu", "auto") for each in scorers)


def devices_taken(recipe: Recipe) -> int:
    """Returns the GPUs that a run on a cluster takes, with fractions packed together as Ray packs them."""
    runtime = recipe.runtime
    shares = [instance_gpus(recipe)] * runtime.instances
    shares += [gpus_of(runtime.trainer_gpus, recipe)] * runtime.trainers
    return packed([*shares, *[1.0] * reward_model_gpus(recipe)])


def packed(shares: Iterable[float]) -> int:
    """Returns the number of devices that hold the shares: whole devices are apart, fractions go where room is left."""
    left: list[float] = []  # of each device that has a fraction
    whole = 0
    for share in sorted(shares, reverse=True):
        if share >= 1:
            whole += -int(-share // 1)
            continue
        place = next((at for at, room in enumerate(left) if room + 1e-9 >= share), None)
        if place is None:
            left.append(1.0)
            place = len(left) - 1
        left[place] -= share
    return whole + sum(room < 1 for room in left)
