"""The sources of the prompts of a run, as its journal has them: files, revisions of data sets, the chat template.

A run that is resumed must have the same rows to train on: its journal names them by their numbers. Rows to evaluate on
may change, and the run says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.chat.templates import Template
from stretto.errors import RunError
from stretto.recipe.schema import Recipe
from stretto.setup.factories import DriverInputs
from stretto.setup.inputs import TaskInputs
from stretto.store.reader import JournalReader
from stretto.store.traces import recorded_in


def data_record(driver: DriverInputs) -> dict[str, Any]:
    """Returns what the journal records."""
    tasks = driver.inputs.tasks
    return {
        "train": {_source(own, name): digest for own in tasks for name, digest in own.task.data.train.items()},
        "evaluation": {
            _source(own, name): digest for own in tasks for name, digest in own.task.data.evaluation.items()
        },
        "chat_template": driver.inputs.chat_template,
        "chat_templates": {_key(own.label): own.tokenizer.chat_template for own in tasks if _chats(own)},
    }


def _key(label: str | None) -> str:
    """Returns the key of a task in the record; that of a task without a label is empty."""
    return label or ""


def _chats(own: TaskInputs) -> bool:
    """True if the chat template has a part in what is sampled. An environment may chat whatever the rows are."""
    return own.prompts.num_templated > 0 or own.task.environment is not None


def _source(own: TaskInputs, name: str) -> str:
    """Returns the name of a source of rows; that of one of several tasks has its label."""
    return name if own.label is None else _labelled(own.label, name)


def _labelled(label: str, name: str) -> str:
    """Returns the name of a source with the label of its task, once."""
    prefix = f"task `{label}`: "
    return f"{prefix}{name.removeprefix(prefix)}"


def recorded_template(run: Path) -> Template | None:
    """Returns the chat template that a run was asked to use; None: that of its model."""
    with JournalReader(run) as reader:
        template: Template | None = reader.data().get("chat_template")
    return template


def recorded_limits(run: Path) -> dict[str | None, int]:
    """Returns the tokens beyond which a run drops or cuts prompts, by the label of the task, if it does."""
    if not recorded_in(run).begun:
        return {}
    with JournalReader(run) as reader:
        facts = reader.facts()
    found: dict[str | None, int] = {label: limit for label, _, _, _, limit in facts.tasks}
    return {label: limit for label, limit in (found or {None: facts.prompt_limit}).items() if limit}


def refuse_other_data(run: Path, recipe: Recipe, now: Mapping[str, Any]) -> str | None:
    """Raises `RunError` if the rows to train on, or the chat template, are not those that a run began with.

    Returns a sentence if the rows to evaluate on have changed.
    """
    if not recorded_in(run).begun:
        return None
    with JournalReader(run) as reader:
        before = reader.data()
    if not before:
        return None
    if differences := _differences(before.get("train", {}), now["train"], recipe, "dataset"):
        raise RunError(
            "\n  ".join(
                [
                    f"the data is not what the run in `{run}` began with:",
                    *differences,
                    "give the data as it was, or start a new run; nothing was changed",
                ]
            )
        )
    templates = before.get("chat_templates") or {}
    others = [label for label, text in now["chat_templates"].items() if templates.get(label, text) != text]
    if before.get("chat_template") != now["chat_template"] or others:
        named = _changed_template(others, recipe)
        raise RunError(
            f"{named} is not what it was when the run in `{run}` began: prompts before and after would not be alike; "
            "give it as it was, or start a new run; nothing was changed"
        )
    held_out = _differences(before.get("evaluation", {}), now["evaluation"], recipe, "evaluation_dataset")
    if before.get("evaluation") and held_out:
        return f"the rows to evaluate on have changed, so earlier scores are of others: {'; '.join(held_out)}"
    return None


def _changed_template(others: Sequence[str], recipe: Recipe) -> str:
    """Names the chat template that has changed: that of the first task of `others`, whose templates are others now."""
    for part in recipe.parts:
        label, asked = part.task.label, getattr(part.task, "chat_template", None)
        if others and _key(label) not in others:
            continue
        if asked is not None:
            return f"`{part.task_table}.chat_template = {asked!r}`"
        if isinstance(recipe.task, tuple):
            return f"the chat template of `model.path`, as the task `{label}` uses it,"
    return "the chat template of `model.path`"


def _differences(before: Mapping[str, str], now: Mapping[str, str], recipe: Recipe, option: str) -> list[str]:
    """Returns a sentence for each source that is another, or not there, or new. `option` names a data set of them."""
    found = []
    for name, digest in before.items():
        if name not in now:
            found.append(f"`{name}` is not read any more" if "`" not in name else f"{name} is not read any more")
        elif now[name] != digest:
            found.append(_changed(name, digest, now[name], recipe, option))
    found += [f"`{name}` is new" if "`" not in name else f"{name} is new" for name in now if name not in before]
    if not found and list(before) != list(now):
        found.append(f"the files come in another order: {', '.join(now)}")
    return found


def _changed(name: str, before: str, now: str, recipe: Recipe, option: str) -> str:
    """Returns a sentence on a file that has changed, or on a data set with another revision."""
    of_tasks = [part for part in recipe.parts if part.task.label is None or name == _labelled(part.task.label, name)]
    from_hub = [part for part in of_tasks if getattr(part.task, option, None) is not None]
    if from_hub and len(before) == len(now) == 40:
        key = f"{from_hub[0].task_table}.{option}.revision"
        return f"{name} was at revision {before}, and is now at {now}; `--set '{key}=\"{before}\"'` reads it as it was"
    return f"{name if '`' in name else f'`{name}`'} has changed since"
