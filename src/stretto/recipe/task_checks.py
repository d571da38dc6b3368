"""Checks of the tasks of a recipe: labels and shares of several, and keys of each that have no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stretto.environments.given import is_given
from stretto.environments.task_options import EnvironmentOptions, ProcessTaskOptions, TaskOptions
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
    if is_given(getattr(task, "reward", None)) or is_given(getattr(task, "environment", None)):
        for key in ("workers", "worker_gib", "worker_episodes", "pass_env", "sandbox"):
            if key in type(task).model_fields:
                yield (
                    key,
                    f"`{name}.{key}` has no effect on what was given from Python, which runs in the driver's process; "
                    "leave it out, or put the function or class into a module",
                )
    if recipe.evaluation.prompts == 0:
        yield "evaluation_path", f"`{name}.evaluation_path` has no effect with `evaluation.prompts = 0`"


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
