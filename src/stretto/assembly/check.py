"""`check`: does what a run does before it builds a model, and shows every value that it would run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tomli_w

from stretto.environments.given import NOTHING_GIVEN, Given
from stretto.models.loading import load_config, load_tokenizer
from stretto.models.routing import replayed_shape
from stretto.models.tiny import WarmStart, tiny_config_of, tiny_tokenizer
from stretto.observe.trackers.catalogue import check_trackers
from stretto.recipe.checks import without_effect
from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_device, resolved
from stretto.setup.inputs import check_objective, check_scoring, load_inputs
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import context_length
from stretto.setup.micro_batch_size import describe_micro_tokens, with_micro_tokens
from stretto.setup.teachers import check_teachers
from stretto.setup.threads import thread_counts

ALL_TARGETS = "all linear layers but the output layer"


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport:
    """The result of `check`. Printed, it is the recipe with its effective values, the notes, and the memory plan."""

    recipe: Recipe  # as it would run on this machine
    effective: str  # the recipe as TOML, with every value that it runs with
    notes: tuple[str, ...]  # sentences on the data and the reward
    memory: str  # the memory plan, as text

    def __str__(self) -> str:
        return self.effective + "\n" + "\n".join([*(f"# {note}" for note in self.notes), self.memory]) + "\n"

    __repr__ = __str__


def check(recipe: Recipe, given: Given = NOTHING_GIVEN) -> CheckReport:
    """Checks a recipe and what was given with it from Python.

    Raises what `train` would raise before it builds a model: for the recipe, the data set, the tokenizer, the lengths
    of the prompts, the reward function, the environment, a custom objective or a tracker. Leaves no process behind, and
    writes nothing.
    """
    recipe = resolved(recipe, choose_device(recipe.runtime.device))
    check_objective(recipe)
    trackers = check_trackers(recipe.observe)
    tiny = recipe.model.is_tiny
    config = tiny_config_of(recipe.model.path) if tiny else load_config(recipe.model.path)
    tokenizer = tiny_tokenizer() if tiny else load_tokenizer(recipe.model.path)
    inputs = load_inputs(recipe, tokenizer, context=context_length(config), model_path=recipe.model.path, given=given)
    of_teachers = check_teachers(recipe, tokenizer, inputs.longest_prompt, templated=inputs.templated)
    scored = check_scoring(recipe, inputs.task, tokenizer)
    asked, device = recipe, choose_device(recipe.runtime.device)
    recipe = with_micro_tokens(recipe, config, inputs.longest_prompt, device)
    memory = describe_memory(recipe, inputs.longest_prompt)
    prompts = (
        f"{inputs.task.name}: {inputs.prompts.num_rows:,} prompts of up to {inputs.longest_prompt} tokens, "
        f"{0 if inputs.held_out is None else inputs.held_out.num_rows:,} held out, "
        f"{inputs.form}, {scored}"
    )
    routing = describe_routing(recipe, config, inputs.longest_prompt)
    notes = (prompts, *routing, *inputs.notes(recipe), *of_teachers, *describe_micro_tokens(asked, recipe), *trackers)
    return CheckReport(recipe, effective(recipe), notes, memory)


def describe_routing(recipe: Recipe, config: Any, longest_prompt: int) -> list[str]:
    """Returns a line on the records of routing; empty for a dense model. Raises `RecipeError` as the trainer would."""
    shape = replayed_shape(config, recipe.training.routing, keeps=recipe.training.keep_routing)
    if shape is None:
        return []
    each, group = shape.bytes_per_token, recipe.rollout.prompts * recipe.rollout.group
    most = each * group * (longest_prompt + recipe.rollout.max_tokens - 1)
    kept = "kept (`training.keep_routing`)" if recipe.training.keep_routing else "deleted after a checkpoint"
    of_token = f"{each} bytes a token ({shape.layers} layers, {shape.chosen} of {shape.experts} experts)"
    return [f"routing is replayed: {of_token}, at most {most / 2**20:,.1f} MiB an update in `routing/`, {kept}"]


def effective(recipe: Recipe) -> str:
    """Returns the recipe as TOML with every value that it runs with, including those that follow from others."""
    values = recipe.model_dump(mode="json")
    plan, rollout, lora = recipe.plan, recipe.rollout, recipe.model.lora
    if rollout.staleness is None:
        values["rollout"]["staleness"] = plan.staleness
    if rollout.staleness == "auto":
        values["rollout"]["staleness_cap"] = plan.staleness
    values["rollout"] |= {"rows": plan.rows, "in_flight": plan.in_flight}
    if plan.filter_limit:
        values["rollout"]["filter_limit"] = plan.filter_limit
    if recipe.task.order == "pass-rate" and recipe.task.pass_reward is None:
        values["task"]["pass_reward"] = 1.0
    if lora is not None:
        values["model"]["lora"]["alpha"] = lora.effective_alpha
    if recipe.model.is_tiny:
        warm_start = values["model"]["warm_start"] or {"seed": 0, "steps": None}
        if warm_start["steps"] is None:
            warm_start["steps"] = WarmStart().steps
        values["model"]["warm_start"] = warm_start
    for key in ("temperature", "max_tokens"):
        if values["evaluation"][key] is None:
            values["evaluation"][key] = getattr(rollout, key)
    threads = thread_counts(recipe)
    values["runtime"] |= {
        "engine_threads": threads.engine,
        "trainer_threads": threads.trainer,
        "slots": recipe.num_slots,
    }
    for section, name in without_effect(recipe):
        values[section].pop(name, None)
    text = tomli_w.dumps(_without_none(values))
    return text.replace("targets = []\n", f"targets = []  # {ALL_TARGETS}\n")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
