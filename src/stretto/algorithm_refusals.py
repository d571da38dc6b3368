"""Why an algorithm is refused in its recipe: what corrects nothing, counts twice, or cannot act beside the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.shaping_options import length_refusals

if TYPE_CHECKING:
    from stretto.config import Recipe

COMPARED_IN_GROUPS = ("group", "group-mean", "leave-one-out")  # advantages for which a group of one has no signal


def may_be_stale(recipe: Recipe) -> bool:
    """Whether a trajectory may be trained on by a later version than its own: K > 0."""
    fixed = recipe.paradigm.staleness
    return recipe.rollout.staleness != 0 if fixed is None else fixed > 0


def options_without_effect(recipe: Recipe) -> dict[tuple[str, str], str]:
    """Options of the algorithm that cannot act in this combination, each with the reason, set or not."""
    algorithm = recipe.algorithm
    found = {("algorithm", name): reason for name, reason in algorithm.without_effect().items()}
    why = _why_every_ratio_is_one(recipe)
    if why:
        for name in algorithm.idle_at_ratio_one():
            found["algorithm", name] = f"`algorithm.{name}` has no effect: {why}"
    return found


def _why_every_ratio_is_one(recipe: Recipe) -> str:
    """With what to do about it; empty where ratios differ from 1."""
    if recipe.training.optimizer_steps > 1:
        return ""
    if _anchor(recipe) == "proximal":
        instead = ', set `algorithm.anchor = "behaviour"`' if _may_be_anchored_on_behaviour(recipe) else ""
        return (
            "its ratio is taken against the policy at the start of the update, and with `training.optimizer_steps = 1` "
            f"that is the policy itself, so every ratio is 1; leave it out{instead}, or raise "
            "`training.optimizer_steps`"
        )
    if not may_be_stale(recipe):
        return (
            "with one step an update and no staleness every ratio is 1, so nothing is ever clipped; leave it out, or "
            "allow staleness"
        )
    return ""


def _anchor(recipe: Recipe) -> str | None:
    """What the ratio is taken against; None where there is no ratio."""
    return getattr(recipe.algorithm, "anchor", None)


def _may_be_anchored_on_behaviour(recipe: Recipe) -> bool:
    annotation = type(recipe.algorithm).model_fields["anchor"].annotation
    return "behaviour" in getattr(annotation, "__args__", ())


def impossible_algorithm(recipe: Recipe) -> Iterable[str]:
    """A sentence for each thing about the algorithm that keeps the recipe from being run."""
    yield from _corrects_nothing(recipe)
    yield from _reference(recipe)
    yield from _filtered_signal(recipe)
    yield from _replay(recipe)
    algorithm, rollout, steps = recipe.algorithm, recipe.rollout, recipe.training.optimizer_steps
    if steps > rollout.prompts:
        yield (
            f"`training.optimizer_steps = {steps}` cuts a batch into parts of whole groups, and `rollout.prompts = "
            f"{rollout.prompts}`; use at most {rollout.prompts}"
        )
    if rollout.group == 1 and algorithm.advantage in COMPARED_IN_GROUPS:
        yield (
            f"`rollout.group = 1` gives every trajectory an advantage of 0 under `{algorithm.type}`: "
            f'`algorithm.advantage = "{algorithm.advantage}"` compares the members of a group; use at least 2, or '
            '`advantage = "whiten"`'
        )
    if rollout.prompts * rollout.group == 1 and algorithm.advantage == "whiten" and recipe.training.replay is None:
        yield (
            "`rollout.prompts = 1` with `rollout.group = 1` gives every trajectory an advantage of 0: "
            '`algorithm.advantage = "whiten"` compares those of a batch; raise one of them'
        )
    critic = getattr(algorithm, "critic", None)
    if steps == 1 and isinstance(critic, CriticOptions) and critic.clip != CriticOptions().clip:
        yield (
            f"`algorithm.critic.clip = {critic.clip}` has no effect: with `training.optimizer_steps = 1` a value is "
            "the one before the update; leave it out, or raise `training.optimizer_steps`"
        )
    if algorithm.turns is not None and recipe.task.max_turns == 1:
        one = "task.turns = 1" if hasattr(recipe.task, "turns") else f'task.type = "{recipe.task.type}"'
        yield (
            f"`[algorithm.turns]` has no effect with `{one}`, whose episodes have one turn; leave it out, or choose a "
            'task of several `turns`, such as "guess" or an "environment" of your own'
        )
    if algorithm.length is not None:
        yield from length_refusals(algorithm.length, max_tokens=rollout.max_tokens, group=rollout.group)


def _corrects_nothing(recipe: Recipe) -> Iterable[str]:
    """The trap: the ratio is against the policy of the update alone, and nothing weighs the age of the data.

    More than one optimizer step does not help: the ratio then holds the steps of the update, and still not the policy
    that sampled.
    """
    algorithm = recipe.algorithm
    if (
        _anchor(recipe) == "proximal"
        and algorithm.correction is None
        and not algorithm.corrects
        and may_be_stale(recipe)
    ):
        instead = 'set `algorithm.anchor = "behaviour"`, or ' if _may_be_anchored_on_behaviour(recipe) else ""
        steps = recipe.training.optimizer_steps
        so = (
            "with `training.optimizer_steps = 1` that is the policy itself, so every ratio is 1"
            if steps == 1
            else f"with `training.optimizer_steps = {steps}` it holds what these steps change and nothing older"
        )
        yield (
            '`algorithm.anchor = "proximal"` corrects nothing here: the ratio is taken against the policy at the start '
            f"of the update, and {so}, while trajectories may be stale; {instead}add `[algorithm.correction]`"
        )


def _reference(recipe: Recipe) -> Iterable[str]:
    kl = recipe.algorithm.kl
    if kl is None:
        return
    if kl.reference is None and recipe.model.lora is None:
        yield (
            "`algorithm.kl.reference` is missing: without `model.lora` there are no adapters to switch off; name the "
            f"model to stay near, such as `reference = {recipe.model.path!r}`, which is loaded a second time"
        )
    if kl.place == "loss" and kl.estimator == "k1":
        yield (
            '`algorithm.kl.estimator = "k1"` has no effect in the loss: its gradient is zero on average, whatever the '
            'reference; use "k2" or "k3", or `algorithm.kl.place = "reward"`'
        )


def _filtered_signal(recipe: Recipe) -> Iterable[str]:
    """What would still learn from a group of equal rewards, which the filter throws away.

    Not so a punishment of overlong completions: the filter goes by the answers alone, as DAPO has it. Nor a divergence
    or an entropy in the loss, which bear on whatever is trained.
    """
    if recipe.rollout.filter != "no-signal":
        return
    algorithm, found = recipe.algorithm, {}
    if algorithm.supervised is not None:
        found["[algorithm.supervised]"] = "imitates groups in which every answer is good", ""
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        found['algorithm.kl.place = "reward"'] = (
            "tells apart trajectories of equal rewards",
            ', choose `place = "loss"`',
        )
    if algorithm.length is not None and algorithm.length.type == "relative":
        found['algorithm.length.type = "relative"'] = "tells apart trajectories of equal rewards by their lengths", ""
    if algorithm.turns is not None:
        found["[algorithm.turns]"] = "tells apart the turns of trajectories of equal rewards", ""
    for option, (what, instead) in found.items():
        yield (
            f'`rollout.filter = "no-signal"` is refused with `{option}`, which {what}: the filter would replace groups '
            f"that do carry a signal; leave one of them out{instead}"
        )


def _replay(recipe: Recipe) -> Iterable[str]:
    """A group of version `w` may be trained in the updates `w` to `w + K`: once, and `K` times again."""
    replay = recipe.training.replay
    try:
        plan = recipe.plan
    except ValueError:
        return  # which is a refusal of its own
    if replay is None or not plan.replay_groups:
        return
    if replay.uses > plan.staleness:
        yield (
            f"`training.replay.uses = {replay.uses}` has no effect above {plan.staleness}: under a staleness of "
            f"{plan.staleness} a group is too old after so many later uses; use at most {plan.staleness}, or allow "
            "more staleness"
        )
    if plan.replay_groups > plan.staleness * plan.batch:
        yield (
            f"`training.replay.ratio = {replay.ratio}` has no effect above {plan.staleness}: under a staleness of "
            f"{plan.staleness} no more than the groups of {plan.staleness} updates are young enough; use at most "
            f"{plan.staleness}, or allow more staleness"
        )
