"""Checks of a recipe as a whole: keys that have no effect in combination, and recipes that cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.environments.given import is_given
from stretto.environments.task_options import EnvironmentOptions, ProcessTaskOptions
from stretto.observe.options import TRACKERS
from stretto.recipe.algorithm_checks import impossible_algorithm, options_without_effect
from stretto.recipe.error_messages import as_toml

if TYPE_CHECKING:
    from stretto.core.plan import Plan
    from stretto.recipe.schema import Recipe

RAY_ONLY = ("address", "instance_cpus", "instance_gpus", "trainers", "trainer_cpus", "trainer_gpus")


def without_effect(recipe: Recipe) -> dict[tuple[str, str], str]:
    """The keys that have no effect in this recipe, set or not, each with the reason."""
    rollout, paradigm = recipe.rollout, recipe.paradigm
    found: dict[tuple[str, str], str] = {}
    if paradigm.staleness is not None:
        found["rollout", "staleness"] = (
            f"`rollout.staleness = {rollout.staleness!r}` has no effect: `{paradigm.name}` always has "
            f'{paradigm.staleness}; leave it out, or choose `paradigm = "multi-version"`'
        )
    if paradigm.one_batch:
        found["rollout", "in_flight"] = (
            f"`rollout.in_flight = {rollout.in_flight!r}` has no effect: `{paradigm.name}` always has one batch of "
            "groups in flight; leave it out"
        )
    if not paradigm.allows_redundancy:
        found["rollout", "redundancy"] = (
            f"`rollout.redundancy` has no effect under `{paradigm.name}`: no batch waits for a group there, and what "
            "is too old is dropped already; raise `rollout.in_flight` instead, or choose another `paradigm`"
        )
    if max(rollout.group, (rollout.redundancy and rollout.redundancy.members) or 0) == 1:
        found["rollout", "spread"] = (
            f'`rollout.spread = "{rollout.spread}"` has no effect with `rollout.group = 1`: one trajectory runs on one '
            "instance; leave it out"
        )
    if rollout.staleness != "auto":
        found["rollout", "staleness_cap"] = (
            '`rollout.staleness_cap` has no effect without `staleness = "auto"`; set that, or leave the cap out'
        )
    if not recipe.model.is_tiny:
        found["model", "warm_start"] = (
            f'`model.warm_start` has no effect on `model.path = {recipe.model.path!r}`: only "tiny" and "tiny-moe" are '
            "warm-started"
        )
    if recipe.model.adapter is None:
        found["model", "merge_adapter"] = (
            "`model.merge_adapter = true` has no effect without `model.adapter`; name the adapter, or leave it out"
        )
    if rollout.filter == "none":
        found["rollout", "filter_limit"] = (
            '`rollout.filter_limit` has no effect without `filter = "no-signal"`; set that, or leave the limit out'
        )
    if recipe.task.order == "shuffled":
        found["task", "pass_reward"] = (
            '`task.pass_reward` has no effect without `order = "pass-rate"`; set that, or leave it out'
        )
    if isinstance(recipe.task, EnvironmentOptions) and recipe.task.workers == 0:
        for name in ("worker_gib", "worker_episodes", "pass_env", "sandbox"):
            found["task", name] = (
                f"`task.{name}` has no effect with `task.workers = 0`, where the driver plays the episodes; leave one "
                "of the two out"
            )
    if is_given(getattr(recipe.task, "reward", None)) or is_given(getattr(recipe.task, "environment", None)):
        for name in ("workers", "worker_gib", "worker_episodes", "pass_env", "sandbox"):
            if name in type(recipe.task).model_fields:
                found["task", name] = (
                    f"`task.{name}` has no effect on what was given from Python, which runs in the driver's process; "
                    "leave it out, or put the function or class into a module"
                )
    if reason := replays_nothing(recipe):
        found["training", "replay"] = f"`training.replay` has no effect: {reason}; leave it out"
    if recipe.training.schedule == "constant":
        for name in ("schedule_start", "schedule_end", "final_fraction"):
            found["training", name] = (
                f'`training.{name}` has no effect with `schedule = "constant"`; choose "linear" or "cosine"'
            )
    if recipe.evaluation.prompts == 0:
        for name in ("every", "temperature", "greedy", "max_tokens"):
            found["evaluation", name] = f"`evaluation.{name}` has no effect with `evaluation.prompts = 0`"
        found["task", "evaluation_path"] = "`task.evaluation_path` has no effect with `evaluation.prompts = 0`"
    elif recipe.evaluation.every >= recipe.training.steps:
        found["evaluation", "every"] = (
            f"`evaluation.every = {recipe.evaluation.every}` has no effect in a run of `training.steps = "
            f"{recipe.training.steps}`, which is always evaluated before and after; use less, or leave it out"
        )
    if recipe.evaluation.prompts and recipe.evaluation.temperature == 0:
        found["evaluation", "greedy"] = (
            "`evaluation.greedy = true` has no effect with `evaluation.temperature = 0`, where every answer is greedy "
            "already; leave `greedy` out, or choose a `temperature` above 0 for the other score"
        )
    if recipe.runtime.slots is not None and (most := _versions_at_once(recipe)) < recipe.runtime.slots:
        found["runtime", "slots"] = (
            f"`runtime.slots = {recipe.runtime.slots}` has no effect above {most}, the most versions of the run at "
            f"once; use at most {most}, or leave it out"
        )
    if recipe.model.lora is not None:
        found["runtime", "durable_versions"] = (
            "`runtime.durable_versions = false` has no effect with `model.lora`: adapters are small and always written "
            "before a group starts on them; leave it out"
        )
    if recipe.runtime.type == "local":
        for name in RAY_ONLY:
            found["runtime", name] = (
                f'`runtime.{name}` has no effect with `runtime.type = "local"`: it is for a cluster; '
                'choose `type = "ray"`, or leave it out'
            )
    return found | _observe_without_effect(recipe) | options_without_effect(recipe)


def _observe_without_effect(recipe: Recipe) -> dict[tuple[str, str], str]:
    sinks = recipe.observe.sinks
    found = {
        ("observe", name): f"`observe.{name}` has no effect without a tracker; name one in `observe.sinks`, or leave "
        "it out"
        for name in ("metrics", "samples", "flush_seconds")
        if not sinks
    }
    for name in TRACKERS:
        if name not in sinks:
            found["observe", name] = (
                f'`observe.{name}` has no effect: `observe.sinks = {as_toml(sinks)}` does not name "{name}"; add it '
                "there, or leave the table out"
            )
    if sinks and recipe.observe.samples and set(sinks) <= {"prometheus"}:
        found["observe", "samples"] = (
            f'`observe.samples = {recipe.observe.samples}` has no effect: "prometheus" takes numbers alone; leave it '
            "out, or name another tracker in `observe.sinks`"
        )
    return found


def _versions_at_once(recipe: Recipe) -> float:
    try:
        return recipe.plan.slots
    except ValueError:  # there is no plan: reported by `_impossible`
        return math.inf


def replays_nothing(recipe: Recipe) -> str:
    """The reason why no group can be reused under this staleness; empty if groups can be."""
    if recipe.paradigm.one_batch:
        return (
            f"under `{recipe.paradigm.name}` every group has reached its largest age when it is trained, so none can "
            'be reused (`paradigm = "multi-version"` allows it)'
        )
    if recipe.rollout.staleness == 0:
        return "with `rollout.staleness = 0` a group is too old after its first update; allow staleness"
    return ""


def ineffective_keys(recipe: Recipe) -> dict[tuple[str, str], str]:
    """The keys that are set and have no effect, each with the reason. A key that is set to its default is allowed."""
    found = {}
    for (name, key), reason in without_effect(recipe).items():
        section = getattr(recipe, name)
        if key in section.model_fields_set and getattr(section, key) != type(section).model_fields[key].default:
            found[name, key] = reason
    return found


def refusals(recipe: Recipe) -> list[str]:
    """The reasons why a recipe is refused, one sentence each."""
    return [*ineffective_keys(recipe).values(), *_impossible(recipe)]


def _impossible(recipe: Recipe) -> Iterable[str]:
    rollout = recipe.rollout
    if rollout.filter == "no-signal" and rollout.group == 1:
        yield (
            '`rollout.filter = "no-signal"` with `rollout.group = 1` would filter everything: the rewards of a group '
            "of one are always equal; use at least 2, or leave the filter out"
        )
    yield from _impossible_redundancy(recipe)
    if rollout.top_k == 1:
        yield (
            "`rollout.top_k = 1` leaves nothing to learn from: every token is certain, so none has a gradient; use at "
            "least 2, or 0 to sample from all"
        )
    task = recipe.task
    if isinstance(task, ProcessTaskOptions) and task.sandbox is not None and task.pass_env:
        yield (
            f"`task.pass_env = {as_toml(task.pass_env)}` would hand these variables to the code in `task.sandbox`, "
            "which has no network to use them; leave one of the two out"
        )
    advantage = recipe.algorithm.advantage
    if rollout.filter == "no-signal" and advantage in ("whiten", "gae"):
        yield (
            f'`rollout.filter = "no-signal"` is refused with `algorithm.advantage = "{advantage}"`, which compares '
            "different groups: a group whose rewards are all equal does carry a signal; use an advantage relative to "
            "the group, or leave the filter out"
        )
    replay = recipe.training.replay
    if replay is not None and replay.ratio * rollout.prompts < 0.5:
        yield (
            f"`training.replay.ratio = {replay.ratio}` of `rollout.prompts = {rollout.prompts}` is less than one "
            f"group; use at least {0.5 / rollout.prompts:.3g}, or leave `training.replay` out"
        )
    yield from impossible_algorithm(recipe)
    try:
        plan = recipe.plan
    except ValueError as error:
        yield str(error)
        return
    most = plan.most_trajectories
    if plan.rows > most:
        yield (
            f"`rollout.rows = {plan.rows}` has no effect above {most}, the trajectories of the "
            f"{plan.in_flight + plan.reserve_groups} groups in flight; use at most {most}, or raise `rollout.in_flight`"
        )
    yield from _impossible_pool(recipe, plan)
    longest = max(rollout.max_tokens, recipe.evaluation.max_tokens or 0)
    least = (longest + 16) * recipe.runtime.instances
    if rollout.kv_tokens is not None and rollout.kv_tokens < least:
        each = f" on each of `runtime.instances = {recipe.runtime.instances}`" if recipe.runtime.instances > 1 else ""
        yield (
            f"`rollout.kv_tokens = {rollout.kv_tokens}` is too small for one completion of `max_tokens = {longest}` "
            f"and a prompt{each}; use at least {least}, or leave it out"
        )


def _impossible_redundancy(recipe: Recipe) -> Iterable[str]:
    rollout, redundancy = recipe.rollout, recipe.rollout.redundancy
    if redundancy is None or not recipe.paradigm.allows_redundancy:
        return
    pairs = (("groups", redundancy.groups, "prompts"), ("members", redundancy.members, "group"))
    few = [(name, got, key) for name, got, key in pairs if got is not None and got < getattr(rollout, key)]
    for name, got, key in few:
        yield (
            f"`rollout.redundancy.{name} = {got}` is less than `rollout.{key} = {getattr(rollout, key)}`, which an "
            "update needs; use more than that, or leave it out"
        )
    if not few and all(got is None or got == getattr(rollout, key) for _, got, key in pairs):
        yield (
            f"`rollout.redundancy` has no effect: it starts no more than the {rollout.prompts} groups of "
            f"{rollout.group} that an update needs; raise `groups` above `rollout.prompts` or `members` above "
            "`rollout.group`, or leave it out"
        )


def _impossible_pool(recipe: Recipe, plan: Plan) -> Iterable[str]:
    runtime = recipe.runtime
    if runtime.trainers > 1 and runtime.trainer_gpus is not None and 0 < runtime.trainer_gpus < 1:
        yield (
            f"`runtime.trainer_gpus = {runtime.trainer_gpus:g}` with `runtime.trainers = {runtime.trainers}` would put "
            "two ranks on one GPU, where NCCL does not work; give each rank a whole GPU, or use fewer ranks"
        )
    if runtime.instances > plan.rows:
        yield (
            f"`runtime.instances = {runtime.instances}` has no effect above `rollout.rows = {plan.rows}`, the "
            "trajectories that run at once; use fewer instances, or raise `rollout.rows`"
        )
    if runtime.slots is not None and runtime.instances * runtime.slots < plan.slots:
        included = ", evaluation's included" if plan.evaluate_every else ""
        yield (
            f"`runtime.instances = {runtime.instances}` of `runtime.slots = {runtime.slots}` hold "
            f"{runtime.instances * runtime.slots} versions at once, and the run needs {plan.slots}{included} (K = "
            f"{plan.staleness}); raise one of them, lower `rollout.staleness`, or leave `runtime.slots` out"
        )
