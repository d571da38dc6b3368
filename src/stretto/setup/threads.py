"""The number of torch threads of each part of a run."""

from __future__ import annotations

import os
from typing import NamedTuple

from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_device


class ThreadCounts(NamedTuple):
    """Torch threads of one instance, and of the trainer."""

    engine: int
    trainer: int


def available_cores() -> int:
    """Returns the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_threads(recipe: Recipe) -> int:
    """Returns the torch threads of each rank of a trainer on a cluster."""
    return recipe.runtime.trainer_threads or max(1, int(recipe.runtime.trainer_cpus))


def thread_counts(recipe: Recipe) -> ThreadCounts:
    """Returns the torch threads of an instance and of the trainer in one process.

    On the CPU, trainer and rollout use all cores each if they take turns, else half each; instances divide the share of
    rollout. OpenMP's thread pools spin, so two parts that run at the same time must not ask for more threads than there
    are cores. On CUDA both only launch kernels, and a spinning pool would delay the launches: one thread each.
    """
    cores = available_cores()
    share = cores if recipe.plan.staleness == 0 else max(1, cores // 2)
    asked = recipe.runtime.device
    if (choose_device(asked).type if asked == "auto" else asked) == "cuda":
        share = 1
    each = max(1, share // recipe.runtime.instances)
    return ThreadCounts(recipe.runtime.engine_threads or each, recipe.runtime.trainer_threads or share)
