"""Checks of a recipe as a whole: keys that have no effect in combination, and recipes that cannot run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.environments.task_options import AgentOptions, EndpointOptions
from stretto.observe.options import TRACKERS
from stretto.recipe.algorithm_checks import impossible_algorithm, options_without_effect
from stretto.recipe.engine_checks import (
    engine_without_effect,
    fewer_versions,
    impossible_engine,
    impossible_full_versions,
)
from stretto.recipe.error_messages import as_toml
from stretto.recipe.task_checks import label_refusals, task_keys_without_effect, task_refusals
from stretto.recipe.task_tables import Path

if TYPE_CHECKING:
    from stretto.core.plan import Plan
    from stretto.recipe.schema import Recipe

RAY_ONLY = ("address", "instance_cpus", "instance_gpus", "trainers", "trainer_cpus", "trainer_gpus")


def without_effect(recipe: Recipe) -> dict[Path, str]:
    """The keys that have no effect in this recipe, set or not, each with the reason."""
    rollout, paradigm = recipe.rollout, recipe.paradigm
    found: dict[Path, str] = {}
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
    if not recipe.model.is_tiny and (recipe.model.warm_start is None or recipe.model.warm_start.path is None):
        found["model", "warm_start"] = (
            f'`model.warm_start` has no effect on `model.path = {recipe.model.path!r}`: only "tiny" and "tiny-moe" are '
            "warm-started without demonstrations; name a file of them in `model.warm_start.path`"
        )
    if recipe.model.adapter is None:
        found["model", "merge_adapter"] = (
            "`model.merge_adapter = true` has no effect without `model.adapter`; name the adapter, or leave it out"
        )
    if rollout.filter == "none":
        found["rollout", "filter_limit"] = (
            '`rollout.filter_limit` has no effect without `filter = "no-signal"`; set that, or leave the limit out'
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
    return (
        found
        | task_keys_without_effect(recipe)
        | engine_without_effect(recipe)
        | _serve_without_effect(recipe)
        | _observe_without_effect(recipe)
        | options_without_effect(recipe)
    )


def _serve_without_effect(recipe: Recipe) -> dict[Path, str]:
    agents = [task for task in recipe.tasks if isinstance(task, AgentOptions)]
    if not agents:
        kinds = " and ".join(sorted({f'`"{task.type}"`' for task in recipe.tasks}))
        one = f'`task.type = "{recipe.tasks[0].type}"`' if len(recipe.tasks) == 1 else f"tasks of type {kinds}"
        reason = f"has no effect with {one}: only agents call an endpoint; leave it out"
    elif all(task.sandbox is not None for task in agents):
        reason = "has no effect with `task.sandbox`, which reaches the endpoint through a socket; leave one of them out"
    else:
        return {}
    return {("serve", name): f"`serve.{name}` {reason}" for name in EndpointOptions.model_fields}


def _observe_without_effect(recipe: Recipe) -> dict[Path, str]:
    sinks = recipe.observe.sinks
    found: dict[Path, str] = {
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


def ineffective_keys(recipe: Recipe) -> dict[Path, str]:
    """The keys that are set and have no effect, each with the reason. A key that is set to its default is allowed."""
    found = {}
    several = {("task", task.label): task for task in recipe.tasks} if isinstance(recipe.task, tuple) else {}
    for path, reason in without_effect(recipe).items():
        section = several[path[0], path[1]] if len(path) == 3 else getattr(recipe, path[0])
        key = path[-1]
        if key in section.model_fields_set and getattr(section, key) != type(section).model_fields[key].default:
            found[path] = reason
    return found


def refusals(recipe: Recipe) -> list[str]:
    """The reasons why a recipe is refused, one sentence each."""
    return label_refusals(recipe) or [*ineffective_keys(recipe).values(), *_impossible(recipe)]


def _impossible(recipe: Recipe) -> Iterable[str]:
    rollout = recipe.rollout
    if rollout.filter == "no-signal" and rollout.group == 1:
        yield (
            '`rollout.filter = "no-signal"` with `rollout.group = 1` would filter everything: the rewards of a group '
            "of one are always equal; use at least 2, or leave the filter out"
        )
    refused = [*_impossible_redundancy(recipe)]
    yield from refused
    if rollout.top_k == 1:
        yield (
            "`rollout.top_k = 1` leaves nothing to learn from: every token is certain, so none has a gradient; use at "
            "least 2, or 0 to sample from all"
        )
    yield from task_refusals(recipe)
    agents = [task for task in recipe.tasks if isinstance(task, AgentOptions) and task.sandbox is None]
    if recipe.serve.port != 0 and len(agents) > 1:
        yield (
            f"`serve.port = {recipe.serve.port}` is one port, and {len(agents)} tasks have agents, each with "
            "an endpoint of its own; leave the port out"
        )
    if recipe.serve.url is not None and recipe.serve.port == 0:
        yield (
            f'`serve.url = "{recipe.serve.url}"` leads nowhere with `serve.port = 0`, which is another port in every '
            "run; name the port"
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
    yield from impossible_engine(recipe)
    try:
        plan = recipe.plan_with(ahead=recipe.may_start_ahead)  # before the device is known: the larger numbers
    except ValueError as error:
        if not refused:
            said = str(error).replace("`batch`", "`prompts`")  # the core's name for it
            yield re.sub(r"`(in_flight|prompts|rows|staleness)`", r"`rollout.\1`", said)
        return
    yield from idle_rows(plan)
    yield from _impossible_pool(recipe, plan)
    yield from impossible_full_versions(recipe, plan)
    longest = max(rollout.max_tokens, recipe.evaluation.max_tokens or 0)
    least = (longest + 16) * recipe.runtime.instances
    if rollout.kv_tokens is not None and rollout.kv_tokens < least:
        each = f" on each of `runtime.instances = {recipe.runtime.instances}`" if recipe.runtime.instances > 1 else ""
        yield (
            f"`rollout.kv_tokens = {rollout.kv_tokens}` is too small for one completion of `max_tokens = {longest}` "
            f"and a prompt{each}; use at least {least}, or leave it out"
        )


def idle_rows(plan: Plan) -> Iterable[str]:
    """Refuses more rows than there are trajectories in flight."""
    most = plan.most_trajectories
    if plan.rows > most:
        yield (
            f"`rollout.rows = {plan.rows}` has no effect above {most}, the trajectories of the "
            f"{plan.in_flight + plan.reserve_groups} groups in flight; use at most {most}, or raise `rollout.in_flight`"
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
        held = runtime.instances * runtime.slots
        yield (
            f"`runtime.instances = {runtime.instances}` of `runtime.slots = {runtime.slots}` hold {held} versions at "
            f"once, and the run needs {plan.slots}{included} (K = {plan.staleness}); raise one of them, "
            f"{fewer_versions(plan, held)}or leave `runtime.slots` out"
        )
