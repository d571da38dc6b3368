"""The scorers that a recipe describes by options: judges and reward models, as reward workers make them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch

from stretto.environments.built_scorers import BuiltScorer
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_options import SCORERS
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.environments.task_options import FileOptions, TaskOptions, option_of
from stretto.environments.tasks import Task
from stretto.errors import RecipeError
from stretto.options import shown_variable
from stretto.recipe.schema import OneTaskRecipe, Recipe
from stretto.setup.device import choose_device, choose_dtype

JUDGE_START_S = 120.0
NO_PASSWORDS = {"NETRC": os.devnull}  # those of `~/.netrc` would be sent in the place of the judge's key
MODEL_ITEMS = 512  # completions that the process of a reward model has at once, to make batches of


def reward_specs(
    recipe: OneTaskRecipe, task: Task, folder: Path | None = None, *, checks: bool = False
) -> tuple[RewardSpec, ...]:
    """Returns the rewards of a task, with what its judges and reward models are made from.

    `folder` is the run folder; None: nothing is kept. `checks`: nothing is scored, so that a judge may be away.
    """
    scorers = scorers_of(recipe.task)

    def completed(spec: RewardSpec) -> RewardSpec:
        options = scorers.get(spec.name)
        if options is None:
            return spec
        option = option_of(options, spec.name, recipe.task_table)
        if isinstance(options, JudgeOptions):
            return replace(spec, built=judge_scorer(options, option, folder, must_answer=not checks))
        return replace(spec, built=model_scorer(recipe, options, option))

    return tuple(map(completed, task.rewards))


def scorers_of(options: TaskOptions) -> Mapping[str, JudgeOptions | RewardModelOptions]:
    """Returns the judges and the reward models of a task, by the name of the reward."""
    return options.scorers if isinstance(options, FileOptions) else {}


def judge_scorer(options: JudgeOptions, option: str, folder: Path | None, *, must_answer: bool = True) -> BuiltScorer:
    """Returns a judge as a worker makes it. `option` is its table in messages.

    `must_answer = False`: a judge that is away prints a line when it is made, and is no error.
    """
    return BuiltScorer(
        SCORERS["judge"],
        option,
        {"options": options, "folder": None if folder is None else str(folder), "must_answer": must_answer},
        deadline_s=options.longest_s,
        start_s=JUDGE_START_S + 4 * options.seconds,
        most_at_once=2 * options.concurrency,  # so that a call that ends is followed by the next one at once
        environment={**NO_PASSWORDS, **judge_variables(options, option)},
    )


def judge_variables(options: JudgeOptions, option: str = "task.judge") -> dict[str, str]:
    """Returns the variable with the key of a judge. Raises `RecipeError` if it is not set."""
    name = options.api_key_env
    if name is None:
        return {}
    if not os.environ.get(name, "").strip():
        raise RecipeError(
            f"`{option}.api_key_env` names {shown_variable(name)}, which is not set in the environment of this "
            "process, or is empty: name a variable there, and set it to the key of the judge"
        )
    return {name: os.environ[name]}


def model_scorer(recipe: Recipe, options: RewardModelOptions, option: str) -> BuiltScorer:
    """Returns a reward model as a worker makes it. `option` is its table in messages."""
    device = reward_model_device(recipe, options, option)
    arguments = {
        "options": options,
        "device": str(device),
        "dtype": str(choose_dtype(options.dtype, device)).removeprefix("torch."),
    }
    return BuiltScorer(
        SCORERS["reward_model"],
        option,
        arguments,
        deadline_s=options.seconds,
        start_s=options.load_seconds,
        most_at_once=MODEL_ITEMS,
        gpus=1.0 if device.type == "cuda" else 0.0,
        environment={"OMP_NUM_THREADS": str(options.threads)} if device.type == "cpu" else {},
    )


def reward_model_device(recipe: Recipe, options: RewardModelOptions, option: str = "task.reward_model") -> torch.device:
    """Returns the device of a reward model: `auto` is another GPU than that of the run, if there is one.

    On a cluster its process has a GPU of its own. Raises `RecipeError` for a GPU that is not there. `option` is its
    table in messages.
    """
    if options.device == "cpu":
        return torch.device("cpu")
    on_cluster = recipe.runtime.type == "ray"
    if options.device == "auto":
        if on_cluster or recipe.runtime.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", 1) if torch.cuda.device_count() > 1 else choose_device("cuda")
    number = int(options.device.partition(":")[2] or 0)
    if on_cluster:  # Ray shows it one GPU
        return torch.device("cuda", 0)
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise RecipeError(
            f'`{option}.device = {options.device!r}`, but torch sees {count} GPUs here; name another one, or "cpu"'
        )
    return torch.device("cuda", number)


def shares_device(recipe: Recipe, options: RewardModelOptions, device: torch.device) -> bool:
    """True if a reward model has its process on the device of the run."""
    if recipe.runtime.type == "ray":
        return False
    found = reward_model_device(recipe, options)
    return found.type == device.type == "cuda" and (found.index or 0) == (device.index or 0)


def described_scorer(options: JudgeOptions | RewardModelOptions) -> str:
    """Returns a phrase on a judge or a reward model."""
    if isinstance(options, JudgeOptions):
        return f"the judge `{options.model}` at {urlsplit(options.address).netloc}"
    return f"the reward model `{options.path}`"
