"""Makes the `TaskPlay` (`run/task_play.py`) of each task of a run, for training and for evaluation.

The recipe of a task has its limits, the inputs of the driver have its prompts, and the backend has its environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from stretto.environments.task_options import EnvironmentOptions
from stretto.recipe.schema import Recipe
from stretto.run.evaluation import Evaluator
from stretto.run.first_reward import FirstReward
from stretto.run.task_play import TaskPlay
from stretto.setup.backend import Backend
from stretto.store.journal import Journal
from stretto.types import Sampling


def training_plays(recipe: Recipe, backend: Backend) -> dict[str | None, TaskPlay]:
    """Returns the play of each task for trajectories that are trained on, by label."""
    sampling = backend.driver.sampling
    return _plays(recipe, backend, lambda part: _limited(sampling, part.rollout.max_tokens, part))


def make_evaluator(recipe: Recipe, backend: Backend, journal: Journal, first_reward: FirstReward) -> Evaluator | None:
    """Makes the evaluator, or returns None if no prompts are held out."""
    driver, wanted = backend.driver, recipe.evaluation
    if driver.inputs.held_out is None:
        return None

    def sampling_of(part: Recipe) -> Sampling:
        temperature = recipe.rollout.temperature if wanted.temperature is None else wanted.temperature
        own = _limited(driver.sampling, wanted.max_tokens or part.rollout.max_tokens, part)
        return replace(own, temperature=temperature, supports=False, routing=False)  # evaluation is not trained on

    return Evaluator(
        driver.inputs.held_out,
        min(wanted.prompts * len(recipe.tasks), driver.inputs.held_out.num_rows),
        tasks=_plays(recipe, backend, sampling_of),
        seed=recipe.seed,
        journal=journal,
        greedy=wanted.greedy,
        vocabulary=driver.vocabulary,
        first_reward=first_reward,
        decode=driver.decode,
    )


def _plays(recipe: Recipe, backend: Backend, sampling_of: Callable[[Recipe], Sampling]) -> dict[str | None, TaskPlay]:
    """Returns how each task is played, by label, with the sampling that `sampling_of` has for its recipe."""
    driver = backend.driver
    plays = {}
    for own in driver.inputs.tasks:
        options, sampling = own.recipe.task, sampling_of(own.recipe)
        played = options if isinstance(options, EnvironmentOptions) else None
        plays[own.label] = TaskPlay(
            backend.tasks[own.label].environment,
            sampling,
            max_turns=own.task.max_turns,
            max_lineages=own.task.max_lineages,
            max_context=driver.inputs.longest_prompt + sampling.max_tokens,
            # A reward function has no deadline here: its pool has its own.
            episode_s=None if own.task.environment is None else recipe.runtime.stall_seconds,
            cut_s=None if played is None else played.episode_seconds,
            budget=math.inf if played is None or played.budget is None else played.budget,
        )
    return plays


def _limited(sampling: Sampling, max_tokens: int, part: Recipe) -> Sampling:
    """Returns the sampling of one task, with its own limits."""
    return replace(sampling, max_tokens=max_tokens, stop_strings=part.rollout.stop)
