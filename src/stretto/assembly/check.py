"""`check`: does what a run does before it builds a model, and shows every value that it would run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tomli_w

from stretto.environments.given import NOTHING_GIVEN, Given, of_task
from stretto.models.loading import load_config, load_tokenizer
from stretto.models.routing import replayed_shape
from stretto.models.stop_tokens import stop_tokens
from stretto.models.tiny import WarmStart, tiny_config_of, tiny_tokenizer
from stretto.observe.trackers.catalogue import check_trackers
from stretto.recipe.checks import without_effect
from stretto.recipe.schema import Recipe
from stretto.recipe.task_tables import remove_key
from stretto.setup.device import choose_device, resolved
from stretto.setup.inputs import TaskInputs, check_objective, check_scoring, load_inputs, prompt_tokenizer
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import context_length
from stretto.setup.micro_batch_size import describe_micro_tokens, with_micro_tokens
from stretto.setup.teachers import check_teachers
from stretto.setup.threads import thread_counts
from stretto.setup.vllm_engines import check_vllm_model
from stretto.setup.warm_starts import check_demonstrations, has_demonstrations

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
    of the prompts, the reward function, the environment, a custom objective or a tracker. Only a judge that cannot be
    reached is a note. Leaves no process behind, and writes nothing.
    """
    recipe = resolved(recipe, choose_device(recipe.runtime.device))
    check_objective(recipe)
    trackers = check_trackers(recipe.observe)
    tiny = recipe.model.is_tiny
    config = tiny_config_of(recipe.model.path) if tiny else load_config(recipe.model.path)
    check_vllm_model(recipe, config)
    of_model = tiny_tokenizer() if tiny else load_tokenizer(recipe.model.path)
    tokenizer = prompt_tokenizer(recipe, of_model)
    inputs = load_inputs(recipe, of_model, context=context_length(config), model_path=recipe.model.path, given=given)
    stops = (tokenizer.eos_token_id,) if tiny else stop_tokens(recipe.model.path, config, tokenizer)
    of_warm_start = check_demonstrations(recipe, tokenizer, config, stops)
    of_teachers = check_teachers(recipe, tokenizer, inputs.longest_prompt, templated=inputs.templated)
    scored, of_judges = [], list[str]()
    for own in inputs.tasks:
        label = own.label if len(inputs.tasks) > 1 else None
        said = list[str]()
        with of_task(label):
            scored.append(check_scoring(own.recipe, own.task, own.tokenizer, said.append))
        of_judges += said if label is None else [f"task `{label}`: {each}" for each in said]
    asked, device = recipe, choose_device(recipe.runtime.device)
    recipe = with_micro_tokens(recipe, config, inputs.longest_prompt, device)
    memory = describe_memory(recipe, inputs.longest_prompt)
    tasks = [_described(own, phrase, recipe) for own, phrase in zip(inputs.tasks, scored, strict=True)]
    notes = (
        *tasks,
        *describe_routing(recipe, config, inputs.longest_prompt),
        *inputs.notes(recipe),
        *of_judges,
        *of_warm_start,
        *of_teachers,
        *describe_micro_tokens(asked, recipe),
        *trackers,
    )
    return CheckReport(recipe, effective(recipe), notes, memory)


def _described(own: TaskInputs, scored: str, recipe: Recipe) -> str:
    """Returns a sentence on one task."""
    held_out = own.held_out
    longest = max(own.prompts.longest_checked, 0 if held_out is None else held_out.longest_checked)
    name = own.task.name
    if len(recipe.tasks) > 1:
        share = (own.recipe.task.share or 1.0) / sum(task.share or 1.0 for task in recipe.tasks)
        name = f"task `{own.label}`, {share:.4g} of the groups, up to {own.recipe.rollout.max_tokens} tokens: {name}"
    return (
        f"{name}: {own.prompts.num_rows:,} prompts of up to {longest} tokens, "
        f"{0 if held_out is None else held_out.num_rows:,} held out, {own.form}, {scored}"
    )


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
    several = isinstance(recipe.task, tuple)
    tables = values["task"] if several else [values["task"]]
    for task, table in zip(recipe.tasks, tables, strict=True):
        if task.order == "pass-rate" and task.pass_reward is None:
            table["pass_reward"] = 1.0
        if several and task.share is None:
            table["share"] = 1.0
    if lora is not None:
        values["model"]["lora"]["alpha"] = lora.effective_alpha
    if recipe.model.is_tiny and not has_demonstrations(recipe):
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
    for path in without_effect(recipe):
        remove_key(values, path)
    text = tomli_w.dumps(_without_none({name: value for name, value in values.items() if value != {}}))
    return text.replace("targets = []\n", f"targets = []  # {ALL_TARGETS}\n")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
