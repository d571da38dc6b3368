"""What the prompts of a run are made from, as its journal has it: files, revisions of data sets, the chat template.

A run that is resumed must have the same rows to train on: its journal names them by their numbers. Rows to evaluate on
may change, and the run says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.chat.templates import Template
from stretto.environments.data_options import RowsOptions
from stretto.errors import RunError
from stretto.recipe.schema import Recipe
from stretto.setup.factories import DriverInputs
from stretto.setup.inputs import asked_template
from stretto.store.reader import JournalReader
from stretto.store.traces import recorded_in


def data_record(recipe: Recipe, driver: DriverInputs) -> dict[str, Any]:
    """Returns what the journal records."""
    data = driver.inputs.task.data
    return {
        "train": dict(data.train),
        "evaluation": dict(data.evaluation),
        "chat_template": asked_template(recipe, driver.tokenizer),
    }


def recorded_template(run: Path) -> Template | None:
    """Returns the chat template that a run was asked to use; None: that of its model."""
    with JournalReader(run) as reader:
        template: Template | None = reader.data().get("chat_template")
    return template


def recorded_limit(run: Path) -> int | None:
    """Returns the tokens beyond which a run drops or cuts prompts; None: it does not, or has not begun."""
    if not recorded_in(run).begun:
        return None
    with JournalReader(run) as reader:
        return reader.facts().prompt_limit or None


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
    if differences := _differences(before.get("train", {}), now["train"], recipe):
        raise RunError(
            "\n  ".join(
                [
                    f"the data is not what the run in `{run}` began with:",
                    *differences,
                    "give the data as it was, or start a new run; nothing was changed",
                ]
            )
        )
    if before.get("chat_template") != now["chat_template"]:
        asked = getattr(recipe.task, "chat_template", None)
        named = f"`task.chat_template = {asked!r}`" if asked is not None else "the chat template of `model.path`"
        raise RunError(
            f"{named} is not what it was when the run in `{run}` began: prompts before and after would not be alike; "
            "give it as it was, or start a new run; nothing was changed"
        )
    others = _differences(before.get("evaluation", {}), now["evaluation"], recipe)
    if before.get("evaluation") and others:
        return f"the rows to evaluate on have changed, so earlier scores are of others: {'; '.join(others)}"
    return None


def _differences(before: Mapping[str, str], now: Mapping[str, str], recipe: Recipe) -> list[str]:
    """Returns a sentence for each source that is another, or not there, or new."""
    found = []
    for name, digest in before.items():
        if name not in now:
            found.append(f"`{name}` is not read any more" if "`" not in name else f"{name} is not read any more")
        elif now[name] != digest:
            found.append(_changed(name, digest, now[name], recipe))
    found += [f"`{name}` is new" if "`" not in name else f"{name} is new" for name in now if name not in before]
    if not found and list(before) != list(now):
        found.append(f"the files come in another order: {', '.join(now)}")
    return found


def _changed(name: str, before: str, now: str, recipe: Recipe) -> str:
    """Returns a sentence on a file that has changed, or on a data set with another revision."""
    task = recipe.task
    if isinstance(task, RowsOptions) and task.dataset is not None and len(before) == len(now) == 40:
        return (
            f"{name} was at revision {before}, and is now at {now}; "
            f"`--set 'task.dataset.revision=\"{before}\"'` reads it as it was"
        )
    return f"{name if '`' in name else f'`{name}`'} has changed since"
