"""`check`: does what a run does before it builds a model, and shows every value that it would run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w
import torch

from stretto.engines.vllm.releases import check_release, installed_release
from stretto.environments.given import NOTHING_GIVEN, Given, of_task
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.errors import ModelError, RecipeError, first_line
from stretto.models.loading import load_config, load_tokenizer, missing_weights
from stretto.models.routing import replayed_shape
from stretto.models.shapes import shape_folder
from stretto.models.stop_tokens import stop_tokens
from stretto.models.tiny import WarmStart, tiny_config_of, tiny_tokenizer
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.length_options import OverlongOptions
from stretto.observe.trackers.catalogue import check_trackers
from stretto.recipe.checks import without_effect
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.schema import Recipe
from stretto.recipe.task_tables import remove_key, without_none
from stretto.setup.architecture_checks import check_architecture
from stretto.setup.chosen_sizes import with_chosen_sizes
from stretto.setup.cluster_devices import gpus_of, instance_gpus
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import CUDA, choose_device, planned_bytes, resolved
from stretto.setup.expert_checks import check_expert_slots
from stretto.setup.inputs import (
    TaskInputs,
    check_objective,
    check_scoring,
    load_inputs,
    prompt_tokenizer,
    refuse_long_completions,
)
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import context_length
from stretto.setup.micro_batch_size import describe_micro_tokens
from stretto.setup.prefill_chunk_size import describe_prefill_tokens
from stretto.setup.rollout_rows import describe_rows
from stretto.setup.scorers import scorers_of
from stretto.setup.teachers import check_teachers
from stretto.setup.threads import thread_counts
from stretto.setup.vllm_engines import check_vllm_model, records_masks
from stretto.setup.warm_starts import check_demonstrations, has_demonstrations
from stretto.training.loss_averaging import with_divisor

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


def check(recipe: Recipe, given: Given = NOTHING_GIVEN, planned: PlannedDevices | None = None) -> CheckReport:
    """Checks a recipe and what was given with it from Python.

    Raises what `train` would raise before it builds a model: for the recipe, the data set, the tokenizer, the lengths
    of the prompts, the reward function, the environment, a custom objective or a tracker. Only a judge that cannot be
    reached is a note. Leaves no process behind, and writes nothing.

    With `planned`, the run is planned for these devices instead of those of this machine. Then the configuration of the
    model is enough: without its tokenizer no prompt is read, and prompts count as long as completions.
    """
    device = choose_device(recipe.runtime.device) if planned is None else _planned_device(recipe)
    recipe = resolved(recipe, device)
    check_objective(recipe)
    trackers = check_trackers(recipe.observe)
    shape = _model_shape(recipe, planned)
    config = shape.config
    check_vllm_model(recipe, config)
    check_expert_slots(recipe, config)
    of_engine = describe_release(recipe, elsewhere=planned is not None)
    of_inputs, longest = _check_inputs(recipe, shape, given, planned)
    check_architecture(recipe, config, longest)
    asked, free = recipe, None if planned is None else planned_bytes(recipe, planned)
    assumed, counted = longest or recipe.rollout.max_tokens, count_models(recipe, config, device)
    recipe = with_chosen_sizes(recipe, config, assumed, device, counted=counted, free=free)
    memory = _memory(recipe, asked, longest, config, counted, planned)
    notes = (
        *shape.notes,
        *of_engine,
        *describe_routing(recipe, config, assumed),
        *of_inputs,
        *describe_rows(asked, recipe),
        *describe_prefill_tokens(asked, recipe),
        *describe_micro_tokens(asked, recipe, assumed),
        *trackers,
    )
    return CheckReport(recipe, effective(recipe), notes, memory)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The parts of a model that a check needs."""

    config: Any
    tokenizer: Any  # None: there is none here
    notes: tuple[str, ...]  # on what is missing here


def _planned_device(recipe: Recipe) -> torch.device:
    """Returns the kind of the devices to plan for. Raises `RecipeError` for a run that is on none of them."""
    if recipe.runtime.device == "cpu":
        raise RecipeError('`devices` are GPUs, and `runtime.device = "cpu"` uses none: leave one of them out')
    for own in recipe.tasks:
        for scorer in scorers_of(own).values():
            on_gpu = isinstance(scorer, RewardModelOptions) and scorer.device != "cpu"
            if on_gpu and recipe.runtime.type == "local":
                raise RecipeError(
                    "`devices` cannot plan for a reward model beside a run in one process: set "
                    '`task.reward_model.device = "cpu"`, or leave `devices` out'
                )
    return CUDA


def _model_shape(recipe: Recipe, planned: PlannedDevices | None) -> _Shape:
    """Loads configuration and tokenizer of the model. Where a run is only planned, the configuration is enough."""
    path = recipe.model.path
    if recipe.model.is_tiny:
        return _Shape(tiny_config_of(path), tiny_tokenizer(), ())
    notes, shipped = [], False
    try:
        config = load_config(path)
    except ModelError as error:
        folder = None if planned is None else shape_folder(path)
        if folder is None:
            raise
        config, shipped = load_config(str(folder)), True
        notes.append(
            f"the configuration of `{path}` is the one that comes with the package. Another was not found: "
            f"{first_line(error)}"
        )
    if (missing := missing_weights(path)) is not None:
        notes.append(missing)
    tokenizer = None
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as error:
        if planned is None:
            raise
        why = "" if shipped else f": {first_line(error)}"
        notes.append(
            f"the tokenizer of `{path}` is not here, so prompts and rewards were not checked, and a prompt counts as "
            f"long as a completion, {recipe.rollout.max_tokens:,} tokens{why}"
        )
    return _Shape(config, tokenizer, tuple(notes))


def check_engine(recipe: Recipe) -> None:
    """Raises `RecipeError` if the engine of a recipe is missing here, or cannot serve its model. Loads no weights."""
    if recipe.engine.type != "vllm":
        return
    describe_release(recipe, elsewhere=False)
    recipe, path = resolved(recipe, choose_device(recipe.runtime.device)), recipe.model.path
    check_vllm_model(recipe, tiny_config_of(path) if recipe.model.is_tiny else load_config(path))


def _memory(
    recipe: Recipe,
    asked: Recipe,
    longest: int | None,
    config: Any,
    counted: CountedModels,
    planned: PlannedDevices | None,
) -> str:
    """Returns the memory plan as text. An error says if the length of prompts was only assumed."""
    try:
        return describe_memory(recipe, longest, config=config, counted=counted, planned=planned, asked=asked)
    except RecipeError as error:
        if longest is not None:
            raise
        raise RecipeError(
            f"{error}. The tokenizer is not here, so a prompt counts as long as a completion, "
            f"{recipe.rollout.max_tokens:,} tokens"
        ) from error


def _check_inputs(
    recipe: Recipe, shape: _Shape, given: Given, planned: PlannedDevices | None
) -> tuple[list[str], int | None]:
    """Checks data, prompts, rewards and teachers. Returns notes on them, and the length of the longest prompt.

    Without a tokenizer only the length of completions is checked, and that of prompts is None.
    """
    of_model, config, path = shape.tokenizer, shape.config, recipe.model.path
    if of_model is None:
        refuse_long_completions(recipe, path, context_length(config))
        return [], None
    tokenizer = prompt_tokenizer(recipe, of_model)
    inputs = load_inputs(recipe, of_model, context=context_length(config), model_path=path, given=given)
    stops = (tokenizer.eos_token_id,) if recipe.model.is_tiny else stop_tokens(path, config, tokenizer)
    of_warm_start = check_demonstrations(recipe, tokenizer, config, stops)
    of_teachers = check_teachers(recipe, tokenizer, inputs.longest_prompt, templated=inputs.templated)
    tasks, of_judges = [], list[str]()
    for own in inputs.tasks:
        label = own.label if len(inputs.tasks) > 1 else None
        said = list[str]()
        with of_task(label):
            tasks.append(_described(own, _scored(own, planned, said.append), recipe))
        of_judges += said if label is None else [f"task `{label}`: {each}" for each in said]
    return [*tasks, *inputs.notes(recipe), *of_judges, *of_warm_start, *of_teachers], inputs.longest_prompt


def _scored(own: TaskInputs, planned: PlannedDevices | None, note: Callable[[str], None]) -> str:
    """Tries the rewards of a task, and returns a phrase on them. A reward model on a GPU that is not here is not.

    `note` gets what is not an error, such as a judge that cannot be reached.
    """
    models = [each for each in scorers_of(own.recipe.task).values() if isinstance(each, RewardModelOptions)]
    if planned is not None and any(each.device != "cpu" for each in models):
        return "scored by a reward model, which was not tried"
    return check_scoring(own.recipe, own.task, own.tokenizer, note)


def describe_release(recipe: Recipe, *, elsewhere: bool) -> list[str]:
    """Returns a line on the vLLM of this machine; empty with another engine.

    Raises `RecipeError` if it is missing or refused, and the run needs it here: in one process, unless `elsewhere`.
    """
    if recipe.engine.type != "vllm":
        return []
    found = installed_release()
    try:
        return [
            f"vLLM {check_release(found, masks=records_masks(recipe))} is installed here, a release that is accepted"
        ]
    except RecipeError as error:
        if recipe.runtime.type == "local" and not elsewhere:
            raise
        return [f"the machines of the instances need vLLM. On this machine {error}"]


def _described(own: TaskInputs, scored: str, recipe: Recipe) -> str:
    """Returns a sentence on one task."""
    held_out = own.held_out
    longest = max(own.prompts.longest_checked, 0 if held_out is None else held_out.longest_checked)
    name = own.task.name
    if len(recipe.tasks) > 1:
        share = (own.recipe.task.share or 1.0) / sum(task.share or 1.0 for task in recipe.tasks)
        groups = recipe.rollout.prompts * recipe.training.steps
        name = f"task `{own.label}`, {_share_text(share, groups)}, up to {own.recipe.rollout.max_tokens} tokens: {name}"
    return (
        f"{name}: {own.prompts.num_rows:,} prompts of up to {longest} tokens, "
        f"{0 if held_out is None else held_out.num_rows:,} held out, {own.form}, {scored}"
    )


def _share_text(share: float, groups: int) -> str:
    """Returns the share of a task in words. A tiny one is not rounded away, nor is what is left of the others."""
    if share * groups < 0.5:
        return f"{share:.4g} of the groups (none of the {groups:,} of this run; raise its `share`)"
    return f"{'more than 0.9999' if 0.99995 <= share < 1 else f'{share:.4g}'} of the groups"


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
    """Returns the recipe as TOML with every value that it runs with, including those that follow from others.

    Options that are off are left out, and so are those that are decided when the model is built, such as
    `training.compile`.
    """
    values = recipe.model_dump(mode="json")
    _fill_in_algorithm(recipe, values["algorithm"])
    start, end = recipe.training.schedule_bounds
    values["training"] |= {"schedule_start": start, "schedule_end": end}
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
        "instance_gpus": instance_gpus(recipe),
        "trainer_gpus": gpus_of(recipe.runtime.trainer_gpus, recipe),
    }
    for path in without_effect(recipe):
        remove_key(values, path)
    text = tomli_w.dumps(without_none({name: value for name, value in values.items() if value != {}}))
    return text.replace("targets = []\n", f"targets = []  # {ALL_TARGETS}\n")


def _fill_in_algorithm(recipe: Recipe, table: dict[str, Any]) -> None:
    """Writes the values of the algorithm that follow from others to the table of its options."""
    algorithm, max_tokens = recipe.algorithm, recipe.rollout.max_tokens
    table["average_tokens"] = with_divisor(algorithm, max_tokens).average_tokens
    if algorithm.kl is not None:
        table["kl"]["estimator"] = algorithm.kl.estimate
    if isinstance(algorithm.length, OverlongOptions) and algorithm.length.max_tokens is None:
        table["length"]["max_tokens"] = max_tokens
    critic = getattr(algorithm, "critic", None)
    if isinstance(critic, CriticOptions) and critic.shared:
        table["critic"]["coefficient"] = critic.loss_factor
