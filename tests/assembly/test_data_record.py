"""A run that is resumed on other data is refused, and the source that has changed is named with its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.assembly.data_record import refuse_other_data
from stretto.errors import RunError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.store.journal import Journal
from stretto.store.schema import JOURNAL_NAME, RunFacts

OLD, NEW = "a" * 40, "b" * 40  # revisions


def recipe(*tasks: dict[str, Any]) -> Recipe:
    shared = {"type": "file", "reward": "a:b"}
    made: Any = [{**shared, **task} for task in tasks]
    return parse_recipe({"model": {"path": "tiny"}, "task": made if len(made) > 1 else made[0]})


def resumed(folder: Path, asked: Recipe, before: dict[str, Any], **now: Any) -> str | None:
    with Journal.open(folder / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        journal.read_from(before)
    return refuse_other_data(folder, asked, {**before, **now})


def data(**changes: Any) -> dict[str, Any]:
    return {"train": {}, "evaluation": {}, "chat_template": None, "chat_templates": {}, **changes}


FILE, FIRST, SECOND = (
    {"label": "file", "path": "rows.jsonl"},
    {"label": "first", "dataset": {"name": "our/first"}},
    {"label": "second", "dataset": {"name": "our/second"}, "evaluation_dataset": {"name": "our/test"}},
)


def test_the_data_set_that_has_moved_on_is_named_with_its_own_task(tmp_path: Path) -> None:
    names = ["task `first`: `our/first` (train)", "task `second`: `our/second` (train)"]
    before = data(train=dict.fromkeys(names, OLD))
    with pytest.raises(RunError) as caught:
        resumed(tmp_path, recipe(FIRST, SECOND), before, train={names[0]: OLD, names[1]: NEW})
    assert f"`--set 'task.second.dataset.revision=\"{OLD}\"'` reads it as it was" in str(caught.value)
    assert "task.first" not in str(caught.value)


def test_a_data_set_of_the_only_task_is_named_without_a_label(tmp_path: Path) -> None:
    before = data(train={"`our/first` (train)": OLD})
    asked = recipe({"dataset": {"name": "our/first"}})
    with pytest.raises(RunError, match=r"`--set 'task\.dataset\.revision="):
        resumed(tmp_path, asked, before, train={"`our/first` (train)": NEW})


def test_a_changed_data_set_to_evaluate_on_is_told_by_its_own_key(tmp_path: Path) -> None:
    name = "task `second`: `our/test` (train)"
    said = resumed(tmp_path, recipe(FILE, SECOND), data(evaluation={name: OLD}), evaluation={name: NEW})
    assert said is not None
    assert "`--set 'task.second.evaluation_dataset.revision=" in said


def test_the_template_that_has_changed_is_named_with_its_own_task(tmp_path: Path) -> None:
    asked = recipe({**FILE, "chat_template": "a.jinja"}, {**SECOND, "chat_template": "b.jinja"})
    before = data(chat_templates={"file": "A", "second": "B"})
    with pytest.raises(RunError, match=r"`task\.second\.chat_template = 'b\.jinja'` is not what it was"):
        resumed(tmp_path, asked, before, chat_templates={"file": "A", "second": "C"})


def test_a_template_of_the_model_is_named_with_the_task_that_it_changed_for(tmp_path: Path) -> None:
    asked = recipe({**FILE, "chat_template": "a.jinja"}, SECOND)
    before = data(chat_templates={"file": "A", "second": "B"})
    with pytest.raises(
        RunError, match=r"the chat template of `model\.path`, as the task `second` uses it, is not what"
    ):
        resumed(tmp_path, asked, before, chat_templates={"file": "A", "second": "C"})


def test_templates_that_an_older_run_did_not_record_are_not_compared(tmp_path: Path) -> None:
    asked = recipe({"path": "rows.jsonl"})
    assert resumed(tmp_path, asked, data(), chat_templates={"": "A"}) is None
