"""Checks of the algorithm against the rest of the recipe: options without effect, and combinations that cannot work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.environments.task_options import rewards_of
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.length_options import length_refusals
from stretto.objectives.teacher_options import teacher_index, teacher_refusals
from stretto.recipe.task_checks import task_name
from stretto.recipe.task_tables import Path

if TYPE_CHECKING:
    from stretto.environments.task_options import TaskOptions
    from stretto.recipe.schema import Recipe

COMPARED_IN_GROUPS = ("group", "group-mean", "leave-one-out")  # advantages that give a group of one no signal


def may_be_stale(recipe: Recipe) -> bool:
    """True if a trajectory may be trained on by a later version than its own: K > 0."""
    fixed = recipe.paradigm.staleness
    return recipe.rollout.staleness != 0 if fixed is None else fixed > 0


def options_without_effect(recipe: Recipe) -> dict[Path, str]:
    """The options of the algorithm that have no effect in this recipe, set or not, each with the reason."""
    algorithm, stale = recipe.algorithm, may_be_stale(recipe)
    found: dict[Path, str] = {("algorithm", name): reason for name, reason in algorithm.without_effect().items()}
    if not stale:
        found.setdefault(
            ("algorithm", "whiten_over"),
            f'`algorithm.whiten_over = "{algorithm.whiten_over}"` has no effect without staleness: a batch has one '
            "version; leave it out, or allow staleness",
        )
        found["algorithm", "staleness_correction"] = (
            "`[algorithm.staleness_correction]` has no effect without staleness: every trajectory is of the version "
            "that is trained; leave it out, or allow staleness"
        )
    if recipe.paradigm.pinned:
        found["algorithm", "mask_older_tokens"] = (
            "`algorithm.mask_older_tokens` has no effect with `rollout.paradigm = "
            f'"{recipe.rollout.paradigm}"`: every token of a trajectory is of one version; leave it out, or choose '
            '"partial"'
        )
    if not stale or algorithm.needs_sampled:
        why = (
            f'`algorithm.type = "{algorithm.type}"` compares engine and trainer on every token'
            if stale
            else "without staleness every token is of the newest version, and all are compared"
        )
        found["training", "mismatch_samples"] = (
            f"`training.mismatch_samples = {recipe.training.mismatch_samples}` has no effect: {why}; leave it out"
        )
    why = _why_every_ratio_is_one(recipe)
    if why:
        for name in algorithm.inactive_at_ratio_one():
            found["algorithm", name] = f"`algorithm.{name}` has no effect: {why}"
    return found


def _why_every_ratio_is_one(recipe: Recipe) -> str:
    """The reason why every ratio is 1, with what to do about it; empty if ratios may differ from 1."""
    if recipe.training.optimizer_steps > 1:
        return ""
    if _anchor(recipe) == "proximal":
        instead = ', set `algorithm.anchor = "behaviour"`' if _may_be_anchored_on_behaviour(recipe) else ""
        return (
            "the ratio is to the policy at the start of the update, and with `training.optimizer_steps = 1` that is "
            f"the policy itself, so every ratio is 1; leave it out{instead}, or raise `training.optimizer_steps`"
        )
    if not may_be_stale(recipe):
        return (
            "with one optimizer step an update and no staleness every ratio is 1, so nothing is ever clipped; leave it "
            "out, or allow staleness"
        )
    return ""


def _anchor(recipe: Recipe) -> str | None:
    """The denominator of the ratio; None if the algorithm has no ratio."""
    return getattr(recipe.algorithm, "anchor", None)


def _may_be_anchored_on_behaviour(recipe: Recipe) -> bool:
    annotation = type(recipe.algorithm).model_fields["anchor"].annotation
    return "behaviour" in getattr(annotation, "__args__", ())


def impossible_algorithm(recipe: Recipe) -> Iterable[str]:
    """The reasons why the algorithm cannot work in this recipe, one sentence each."""
    yield from _corrects_nothing(recipe)
    yield from _never_clips(recipe)
    yield from _correction_levels(recipe)
    yield from _reference(recipe)
    yield from _teachers(recipe)
    yield from _filtered_signal(recipe)
    yield from _replay(recipe)
    algorithm, rollout, steps = recipe.algorithm, recipe.rollout, recipe.training.optimizer_steps
    if steps > rollout.prompts:
        yield (
            f"`training.optimizer_steps = {steps}` needs a group for each step, and `rollout.prompts = "
            f"{rollout.prompts}`; use at most {rollout.prompts}"
        )
    if rollout.group == 1 and algorithm.advantage in COMPARED_IN_GROUPS and algorithm.uses_rewards:
        yield (
            f"`rollout.group = 1` gives every trajectory an advantage of 0 under `{algorithm.type}`: "
            f'`algorithm.advantage = "{algorithm.advantage}"` compares the members of a group; use at least 2, or '
            '`advantage = "whiten"`'
        )
    if rollout.prompts * rollout.group == 1 and algorithm.advantage == "whiten" and recipe.training.replay is None:
        yield (
            "`rollout.prompts = 1` with `rollout.group = 1` gives every trajectory an advantage of 0: "
            '`algorithm.advantage = "whiten"` compares the trajectories of a batch; raise one of them'
        )
    critic = getattr(algorithm, "critic", None)
    if steps == 1 and isinstance(critic, CriticOptions) and critic.clip != CriticOptions().clip:
        yield (
            f"`algorithm.critic.clip = {critic.clip}` has no effect: with `training.optimizer_steps = 1` every value "
            "is that before the update; leave it out, or raise `training.optimizer_steps`"
        )
    if algorithm.turns is not None and max(task.max_turns for task in recipe.tasks) == 1:
        one = _of_one_turn(recipe)
        yield (
            f"`[algorithm.turns]` has no effect with `{one}`, whose episodes have one turn; leave it out, or choose a "
            'task of several `turns`, such as "guess" or your own "environment"'
        )
    if algorithm.length is not None:
        yield from length_refusals(algorithm.length, max_tokens=rollout.max_tokens, group=rollout.group)


def _corrects_nothing(recipe: Recipe) -> Iterable[str]:
    """Refuses stale data without any correction: a ratio to the policy of the update ignores the age of the data.

    More than one optimizer step does not help: the ratio then covers the steps of the update, but not the policy that
    sampled.
    """
    algorithm = recipe.algorithm
    if (
        _anchor(recipe) == "proximal"
        and algorithm.correction is None
        and algorithm.staleness_correction is None
        and not algorithm.corrects_off_policy
        and may_be_stale(recipe)
    ):
        instead = 'set `algorithm.anchor = "behaviour"`, or ' if _may_be_anchored_on_behaviour(recipe) else ""
        steps = recipe.training.optimizer_steps
        so = (
            "with `training.optimizer_steps = 1` that is the policy itself, so every ratio is 1"
            if steps == 1
            else f"with `training.optimizer_steps = {steps}` it covers these steps and nothing older"
        )
        yield (
            '`algorithm.anchor = "proximal"` does not correct for staleness: the ratio is to the policy at the start '
            f"of the update, and {so}, while trajectories may be stale; {instead}add `[algorithm.correction]`"
        )


def _never_clips(recipe: Recipe) -> Iterable[str]:
    """Refuses an objective that is about clipping where its ratio is identically 1, so that only its weight acts."""
    algorithm = recipe.algorithm
    if (
        _anchor(recipe) == "proximal"
        and algorithm.corrects_off_policy
        and recipe.training.optimizer_steps == 1
        and may_be_stale(recipe)
    ):
        instead = ', set `algorithm.anchor = "sampled"`' if algorithm.type == "dora" else ""
        yield (
            f'`algorithm.type = "{algorithm.type}"` clips the ratio to the policy at the start of the update, and with '
            "`training.optimizer_steps = 1` that is the policy itself: every ratio is 1 and nothing is ever clipped, "
            f"while trajectories may be stale; raise `training.optimizer_steps`{instead}, or choose another type"
        )


def _correction_levels(recipe: Recipe) -> Iterable[str]:
    if max(task.max_turns for task in recipe.tasks) == 1:
        for table in recipe.algorithm.corrections:
            if table is not None and table.level == "turn":
                yield (
                    f'`{table.table}.level = "turn"` has no effect beyond "sequence" with '
                    f'`task.type = "{recipe.tasks[0].type}"`, whose episodes have one turn; choose "sequence"'
                )


def _of_one_turn(recipe: Recipe) -> str:
    """Returns the key that gives the first task one turn."""
    task = recipe.tasks[0]
    return "task.turns = 1" if hasattr(task, "turns") else f'task.type = "{task.type}"'


def _reference(recipe: Recipe) -> Iterable[str]:
    kl = recipe.algorithm.kl
    if kl is None:
        return
    if kl.reference is None and recipe.model.lora is None:
        yield (
            "`algorithm.kl.reference` is missing: without `model.lora` there are no adapters to switch off; name a "
            f"reference model, for example `reference = {recipe.model.path!r}`, which is then loaded a second time"
        )
    if kl.place == "loss" and kl.estimator == "k1":
        yield (
            '`algorithm.kl.estimator = "k1"` has no effect in the loss: its gradient is zero on average, whatever the '
            'reference; use "k2" or "k3", or `algorithm.kl.place = "reward"`'
        )


def _teachers(recipe: Recipe) -> Iterable[str]:
    """Refuses teachers that cannot teach, and distillation or a task without what trains it."""
    algorithm = recipe.algorithm
    labels = [task.label for task in recipe.tasks]
    yield from teacher_refusals(algorithm.teachers, labels)
    if not algorithm.uses_rewards:
        if not algorithm.teachers:
            yield (
                f'`algorithm.type = "{algorithm.type}"` needs a teacher: add a table `[[algorithm.teachers]]` with a '
                "`path`"
            )
        for label in labels:
            if algorithm.teachers and teacher_index(algorithm.teachers, label) is None:
                yield f"the task {label!r} has no teacher, so nothing trains it; add it to the `tasks` of one"
        if algorithm.kl is not None and algorithm.kl.place == "reward":
            yield (
                '`algorithm.kl.place = "reward"` has no effect with `algorithm.type = "distill"`, which no reward '
                'trains; choose `place = "loss"`'
            )
    for task in recipe.tasks:
        yield from _unrewarded(recipe, task)


def _unrewarded(recipe: Recipe, task: TaskOptions) -> Iterable[str]:
    """Refuses a task without a reward where something needs one."""
    algorithm, name = recipe.algorithm, task_name(recipe, task)
    scored = bool(rewards_of(task)) or getattr(task, "scorer", None) is not None
    if getattr(task, "reward", "") is None and task.type != "agent" and not scored:
        if algorithm.uses_rewards:
            yield (
                f'`{name}.reward` is missing: `algorithm.type = "{algorithm.type}"` learns from rewards; name a '
                'function, `package.module:function`, or choose `algorithm.type = "distill"`'
            )
        if recipe.evaluation.prompts:
            yield (
                f"`evaluation.prompts = {recipe.evaluation.prompts}` needs `{name}.reward`, which scores the answers; "
                "name a function, or set `evaluation.prompts = 0`"
            )
        if task.order == "pass-rate":
            yield f'`{name}.order = "pass-rate"` needs `{name}.reward`; name a function, or leave the order out'
        if algorithm.supervised is not None:
            yield f"`[algorithm.supervised]` needs `{name}.reward`, which says what is imitated; name a function"


def _filtered_signal(recipe: Recipe) -> Iterable[str]:
    """Refuses the filter together with options that learn from a group of equal rewards, which it discards.

    The overlong penalty is allowed: as in DAPO, the filter looks at the unshaped rewards. So are a divergence and an
    entropy bonus in the loss, which act on whatever is trained.
    """
    if recipe.rollout.filter != "no-signal":
        return
    algorithm, found = recipe.algorithm, {}
    if algorithm.supervised is not None:
        found["[algorithm.supervised]"] = "learns from groups in which every answer is good", ""
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        found['algorithm.kl.place = "reward"'] = (
            "distinguishes trajectories of equal rewards",
            ', choose `place = "loss"`',
        )
    if algorithm.length is not None and algorithm.length.type == "relative":
        found['algorithm.length.type = "relative"'] = "distinguishes trajectories of equal rewards by their lengths", ""
    if algorithm.turns is not None:
        found["[algorithm.turns]"] = "distinguishes the turns of trajectories of equal rewards", ""
    if algorithm.teachers:
        found["[[algorithm.teachers]]"] = "teach on every group, whatever its rewards", ""
    for option, (effect, instead) in found.items():
        yield (
            f'`rollout.filter = "no-signal"` is refused with `{option}`, which {effect}: the filter would replace '
            f"groups that do carry a signal; leave one of them out{instead}"
        )


def _replay(recipe: Recipe) -> Iterable[str]:
    """Refuses more reuse than staleness allows: a group of version `w` may be trained in updates `w` to `w + K`."""
    replay = recipe.training.replay
    try:
        plan = recipe.plan
    except ValueError:
        return  # there is no plan: reported elsewhere
    if replay is None or not plan.replay_groups:
        return
    if replay.uses > plan.staleness:
        yield (
            f"`training.replay.uses = {replay.uses}` has no effect above {plan.staleness}: with a staleness of "
            f"{plan.staleness} a group is too old after that many later uses; use at most {plan.staleness}, or allow "
            "more staleness"
        )
    if plan.replay_groups > plan.staleness * plan.batch:
        yield (
            f"`training.replay.ratio = {replay.ratio}` has no effect above {plan.staleness}: with a staleness of "
            f"{plan.staleness} only the groups of {plan.staleness} updates are recent enough; use at most "
            f"{plan.staleness}, or allow more staleness"
        )
