"""Recipes of several tasks: `[[task]]`, overrides by label, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stretto.environments.task_shares import Share
from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe

RECIPE = """
[model]
path = "tiny"
[[task]]
label = "math"
share = 0.7
type = "countdown-chain"
max_tokens = 64
[[task]]
label = "chains"
share = 0.3
type = "guess"
turns = 3
"""


def tables(text: str = RECIPE) -> dict[str, Any]:
    return tomllib.loads(text)


def test_several_tasks_are_read_written_and_read_again() -> None:
    recipe = load_recipe(tables())
    assert recipe.shares == {"math": Share(0.7), "chains": Share(0.3)}
    assert load_recipe(tomllib.loads(recipe.dumps())).dumps() == recipe.dumps()
    assert recipe.dumps().count("[[task]]") == 2
    assert [part.task.label for part in recipe.parts] == ["math", "chains"]
    assert [part.rollout.max_tokens for part in recipe.parts] == [64, 256], "limits of its own"
    assert recipe.num_answers == 2 * recipe.evaluation.prompts


def test_one_task_stays_one_table() -> None:
    recipe = load_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}, ["task.size=9"])
    assert "[task]" in recipe.dumps()
    assert "[[task]]" not in recipe.dumps()
    assert "label" not in recipe.dumps()
    assert [part.task for part in recipe.parts] == [recipe.task]


def test_overrides_name_a_task_by_its_label(tmp_path: Path) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(RECIPE)
    assert load_recipe(path, ["task.math.share=0.5", "task.chains.turns=5"]).tasks[1].max_turns == 5
    assert load_recipe(tables(), {"task.math.share": 3, "task.chains.share": 1}).shares["math"] == Share(3)
    assert load_recipe(load_recipe(path), {"task.math.share": 0.2}).shares["math"] == Share(0.2), "of one that was read"
    both_removed = load_recipe(path, ["task.math.share=", "task.chains.share="])
    assert both_removed.shares == {"math": Share(1.0), "chains": Share(1.0)}, "by default all have the same"


REFUSED = {
    "all 0": (["task.math.share=0", "task.chains.share=0"], "the `share` of every task is 0"),
    "one 0": (["task.math.share=0"], r"`task\.math\.share = 0` trains nothing of it; leave the task out"),
    "negative": (["task.math.share=-0.5"], r"`task\.math\.share = -0\.5` must be more than 0"),
    "nan": (["task.math.share=nan"], r"`task\.math\.share = nan` must be a finite number"),
    "no number": (["task.math.share=half"], r'`task\.math\.share = "half"` must be a number'),
    "one without": (["task.chains.share="], r"`task\.chains\.share` is missing: give every task a share, or none"),
    "duplicate": (["task.chains.label=math"], '2 tasks have `label = "math"`; give each its own'),
    "no label": (["task.chains.label="], r"`task\[1\]\.label` is missing"),
    "a dot": (["task.math.label=a.b"], r'`task\[0\]\.label = "a\.b"` must be letters, digits, `_` and `-`, and a'),
    "unknown label": (["task.mat.share=1"], r"no task has the label `mat`; did you mean `task\.math\.share`\?"),
    "unknown label without a hint": (["task.zzz.share=1"], r"no task has the label `zzz` \(labels: `math`, `chains`"),
    "no label named": (["task.share=1"], r"several tasks; name one of them, as in `task\.math\.share`"),
    "unknown key": (["task.math.sise=1"], r"`task\.math\.sise` is not an option; did you mean `task\.size`"),
    "key of another type": (["task.math.turns=1"], r"`task\.math\.turns` is not an option here: it belongs to"),
    "unknown type": (["task.math.type=foo"], r'`task\.math\.type = "foo"` must be one of'),
    "too many tokens": (["task.math.max_tokens=999"], r"`task\.math\.max_tokens = 999` is more than `rollout\.max_t"),
    "oversample below 1": (["task.math.oversample=0.5"], r"`task\.math\.oversample = 0\.5` must be at least 1"),
    "no effect": (["task.math.pass_reward=0.5"], r'`task\.math\.pass_reward` has no effect without `order = "pass'),
    "removed twice": (["task.math.size="], r"removes `task\.math\.size` from the recipe, and the recipe has no such"),
    "penalty": (
        ["algorithm.length={type='overlong', cache=10}"],
        r"`task\.math\.max_tokens = 64` ends completions before `algorithm\.length` counts them",
    ),
    "teacher of nobody": (
        ["algorithm.teachers=[{path='tiny', tasks=['mth']}]"],
        "names 'mth', which is no label of a task: the labels are 'math', 'chains'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_mixture_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(tables(), overrides)


def test_shares_of_a_single_task_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"`task\.share` has no effect: the recipe has one task"):
        load_recipe({"model": {"path": "tiny"}, "task": {"type": "guess", "share": 0.5}})
    with pytest.raises(RecipeError, match=r"`task\.only\.share` has no effect: it is the only task"):
        load_recipe({"model": {"path": "tiny"}, "task": [{"type": "guess", "label": "only", "share": 0.5}]})
    with pytest.raises(RecipeError, match=r"`task = \[\]` must be a list of at least 1"):
        load_recipe({"model": {"path": "tiny"}, "task": []})


def test_teachers_are_chosen_by_label() -> None:
    two = "[{path='tiny', tasks=['math']}, {path='tiny', tasks=['chains']}]"
    recipe = load_recipe(tables(), [f"algorithm.teachers={two}"])
    assert [teacher.tasks for teacher in recipe.algorithm.teachers] == [("math",), ("chains",)]
    with pytest.raises(RecipeError, match="the task 'chains' has no teacher, so nothing trains it"):
        load_recipe(tables(), ["algorithm={type='distill', teachers=[{path='tiny', tasks=['math']}]}"])
