"""Checks of the tasks of a recipe: labels and shares of several, and keys of each that have no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stretto.environments.given import is_given
from stretto.environments.reward_options import refused_rewards
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.task_options import (
    EnvironmentOptions,
    FileOptions,
    ProcessTaskOptions,
    TaskOptions,
    rewards_of,
)
from stretto.recipe.error_messages import as_toml
from stretto.recipe.task_tables import Path

if TYPE_CHECKING:
    from stretto.recipe.schema import Recipe


def task_name(recipe: Recipe, task: TaskOptions) -> str:
    """Returns the dotted name of a task's table: `task`, or `task.LABEL` of several."""
    return f"task.{task.label}" if isinstance(recipe.task, tuple) else "task"


def task_keys_without_effect(recipe: Recipe) -> dict[Path, str]:
    """The keys of tasks that have no effect, set or not, each with the reason."""
    found: dict[Path, str] = {}
    for task in recipe.tasks:
        name = task_name(recipe, task)
        if task.label is None and isinstance(recipe.task, tuple):
            continue  # `label_refusals` names it
        for key, reason in _without_effect(recipe, task, name):
            found[(*name.split("."), key)] = reason
    return found


def _without_effect(recipe: Recipe, task: TaskOptions, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(recipe.task, tuple):
        for key in ("share", "oversample"):
            yield (
                key,
                f"`task.{key}` has no effect: the recipe has one task, `[task]`; leave it out, or write `[[task]]` for "
                "each of several",
            )
    if task.order == "shuffled":
        yield (
            "pass_reward",
            f'`{name}.pass_reward` has no effect without `order = "pass-rate"`; set that, or leave it out',
        )
    if isinstance(task, EnvironmentOptions) and task.workers == 0:
        for key in ("worker_gib", "worker_episodes", "pass_env", "sandbox"):
            yield (
                key,
                f"`{name}.{key}` has no effect with `{name}.workers = 0`, where the driver plays the episodes; leave "
                "one of the two out",
            )
    if isinstance(task, FileOptions) and (scorer := task.scorer) is not None:
        instead = "seconds" if scorer == "reward_model" else "outage_seconds"
        yield (
            "reward_seconds",
            f"`{name}.reward_seconds` has no effect with `{name}.{scorer}`, which has deadlines of its own; set "
            f"`{name}.{scorer}.{instead}` instead",
        )
        yield (
            "reward_workers",
            f"`{name}.reward_workers` has no effect with `{name}.{scorer}`, which has one process; leave it out",
        )
    if _runs_given(task):
        for key in ("workers", "worker_gib", "worker_episodes", "pass_env", "sandbox"):
            if key in type(task).model_fields:
                yield (
                    key,
                    f"`{name}.{key}` has no effect on what was given from Python, which runs in the driver's process; "
                    "leave it out, or put the function or class into a module",
                )
    if recipe.evaluation.prompts == 0:
        for key in ("evaluation_path", "evaluation_dataset"):
            yield key, f"`{name}.{key}` has no effect with `evaluation.prompts = 0`"


def _runs_given(task: TaskOptions) -> bool:
    """True if code that was given from Python scores or plays the task."""
    named = (getattr(task, "reward", None), getattr(task, "environment", None))
    return any(map(is_given, named)) or any(is_given(getattr(each, "function", None)) for each in rewards_of(task))


def label_refusals(recipe: Recipe) -> list[str]:
    """The reasons why the labels of several tasks cannot be used, a sentence each."""
    if not isinstance(recipe.task, tuple):
        return []
    found = [
        f"`task[{place}].label` is missing: each of several tasks, `[[task]]`, needs a name, such as `label = "
        f'"{_suggested(task)}"`'
        for place, task in enumerate(recipe.task)
        if task.label is None
    ]
    counts = Counter(task.label for task in recipe.task if task.label is not None)
    found += [
        f"{count} tasks have `label = {as_toml(label)}`; give each its own"
        for label, count in counts.items()
        if count > 1
    ]
    return found


def _suggested(task: TaskOptions) -> str:
    return task.type.replace("-", "_")


def task_refusals(recipe: Recipe) -> Iterable[str]:
    """The reasons why the tasks of a recipe cannot be run, a sentence each."""
    rollout = recipe.rollout
    yield from _share_refusals(recipe)
    for task in recipe.tasks:
        name = task_name(recipe, task)
        if isinstance(task, ProcessTaskOptions) and task.sandbox is not None and task.pass_env:
            yield (
                f"`{name}.pass_env = {as_toml(task.pass_env)}` would hand these variables to the code in "
                f"`{name}.sandbox`, which has no network to use them; leave one of the two out"
            )
        yield from refused_rewards(getattr(task, "reward", None), rewards_of(task), name)
        yield from _scorer_refusals(task, name)
        if task.max_tokens is None:
            continue
        if task.max_tokens > rollout.max_tokens:
            yield (
                f"`{name}.max_tokens = {task.max_tokens}` is more than `rollout.max_tokens = {rollout.max_tokens}`, "
                "the most of any task; raise that"
            )
        length = recipe.algorithm.length
        if length is not None and length.type == "overlong" and task.max_tokens < rollout.max_tokens:
            yield (
                f"`{name}.max_tokens = {task.max_tokens}` ends completions before `algorithm.length` counts them as "
                f"overlong, by the limit of the whole run (`rollout.max_tokens = {rollout.max_tokens}`); leave one of "
                "the two out"
            )


def _scorer_refusals(task: TaskOptions, name: str) -> Iterable[str]:
    if not isinstance(task, FileOptions):
        return
    several = [key for key in ("reward", "rewards", "judge", "reward_model") if getattr(task, key)]
    if task.scorer is not None and len(several) > 1:
        yield (
            f"a completion has one scorer: `{name}.{several[0]}` or `{name}.{several[1]}`; leave one of them out, or "
            "give each a table `[[task.rewards]]`, with the key `function`, `judge` or `model`"
        )
    if task.scorers and task.sandbox is not None:
        kind = "a judge" if any(isinstance(each, JudgeOptions) for each in task.scorers.values()) else "a reward model"
        yield (
            f"{kind} cannot run in `{name}.sandbox`, which has no network and no files of models; it runs no code of "
            "the model: leave the sandbox out"
        )


def _share_refusals(recipe: Recipe) -> Iterable[str]:
    if not isinstance(recipe.task, tuple):
        return
    shares = {task.label: task.share for task in recipe.task}
    given = {label: share for label, share in shares.items() if share is not None}
    if given and not any(given.values()):
        yield "the `share` of every task is 0, so nothing would be trained; give each a share above 0"
        return
    for label, share in given.items():
        if share == 0:
            yield f"`task.{label}.share = 0` trains nothing of it; leave the task out"
        elif share < 0:
            yield f"`task.{label}.share = {share:g}` must be more than 0"
    if given and len(given) < len(shares):
        missing = next(label for label, share in shares.items() if share is None)
        yield f"`task.{missing}.share` is missing: give every task a share, or none, and all have the same"
    if len(shares) == 1:
        (task,) = recipe.task
        for key in ("share", "oversample"):
            if getattr(task, key) is not None:
                yield f"`task.{task.label}.{key}` has no effect: it is the only task; leave it out"
