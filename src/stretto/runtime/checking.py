"""`check`: everything that a run does before it builds a model, and every value that it would run with."""

from __future__ import annotations

from typing import Any

import tomli_w

from stretto.config import Recipe
from stretto.models import load_config, load_tokenizer
from stretto.refusals import without_effect
from stretto.runtime.device import choose_device, resolved
from stretto.runtime.inputs import check_scoring, load_inputs
from stretto.runtime.memory import context_length, describe_memory
from stretto.runtime.parts import role_threads
from stretto.tiny import WarmStart, tiny_config, tiny_tokenizer

ALL_TARGETS = "all linear layers but the output layer"


def check(recipe: Recipe) -> str:
    """The recipe with its effective values, what is worth knowing of its data, and its memory.

    Raises what `train` would raise before it builds a model: of the recipe, the data set, the tokenizer, the lengths
    of the prompts, the reward function or the environment. Starts nothing that stays, and writes nothing.
    """
    recipe = resolved(recipe, choose_device(recipe.runtime.device))
    tiny = recipe.model.path == "tiny"
    config = tiny_config() if tiny else load_config(recipe.model.path)
    tokenizer = tiny_tokenizer() if tiny else load_tokenizer(recipe.model.path)
    inputs = load_inputs(recipe, tokenizer, context=context_length(config), model_path=recipe.model.path)
    scored = check_scoring(recipe, inputs.task, tokenizer)
    memory = describe_memory(recipe, inputs.longest_prompt)
    prompts = (
        f"{inputs.task.name}: {inputs.prompts.num_rows:,} prompts of up to {inputs.longest_prompt} tokens, "
        f"{0 if inputs.held_out is None else inputs.held_out.num_rows:,} held out, "
        + ("made by the chat template" if inputs.templated else "raw text")
        + f", {scored}"
    )
    notes = [f"# {note}" for note in (prompts, *inputs.notes(recipe))]
    return effective(recipe) + "\n" + "\n".join([*notes, memory]) + "\n"


def effective(recipe: Recipe) -> str:
    """The recipe as TOML with every value that it runs with, those included that follow from others."""
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
        values["model"]["lora"]["alpha"] = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    if recipe.model.path == "tiny":
        warm_start = values["model"]["warm_start"] or {"seed": 0, "steps": None}
        if warm_start["steps"] is None:
            warm_start["steps"] = WarmStart().steps
        values["model"]["warm_start"] = warm_start
    if values["training"]["final_fraction"] is None:
        values["training"]["final_fraction"] = 0.0
    for key in ("temperature", "max_tokens"):
        if values["evaluation"][key] is None:
            values["evaluation"][key] = getattr(rollout, key)
    engine, trainer = role_threads(recipe)
    values["runtime"] |= {"engine_threads": engine, "trainer_threads": trainer, "slots": recipe.num_slots}
    for section, name in without_effect(recipe):
        values[section].pop(name, None)
    text = tomli_w.dumps(_without_none(values))
    return text.replace("targets = []\n", f"targets = []  # {ALL_TARGETS}\n")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
