"""The tables `[[task.rewards]]` of a recipe: what they become, and what is refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from stretto.environments.reward_calls import RewardSpec
from stretto.environments.task_options import FileOptions
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe

ROWS = [{"prompt": f"{number}?", "answer": number} for number in range(10)]


def recipe(*rewards: dict[str, Any], **task: Any) -> Recipe:
    return parse_recipe(
        {
            "model": {"path": "tiny"},
            "task": {"type": "file", "path": "rows.jsonl", "rewards": list(rewards), **task},
        }
    )


def refusal(*rewards: dict[str, Any], **task: Any) -> str:
    with pytest.raises(RecipeError) as raised:
        recipe(*rewards, **task)
    return str(raised.value)


def test_a_table_becomes_what_a_process_makes_the_reward_from(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2"}\n' * 5)
    made = recipe(
        {"function": "mine:correct"},
        {"name": "style", "function": "mine:Judge", "weight": -0.5, "options": {"words": ["a", "b"]}, "batched": True},
        path=str(path),
    )
    assert isinstance(made.task, FileOptions)
    task = load_task(made.task, num_evaluation=1)
    assert task.reward is None
    assert task.rewards == (
        RewardSpec("correct", "mine:correct"),
        RewardSpec("style", "mine:Judge", -0.5, {"words": ["a", "b"]}, True),
    )
    assert parse_recipe(tomllib.loads(made.dumps())) == parse_recipe(tomllib.loads(made.source_toml()))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (
            [{"function": "mine:a"}, {"name": "a", "function": "mine:b"}],
            "2 rewards with the name `a`: give each",
        ),
        ([{"function": "mine:a", "weight": 0.0}], "every reward has `weight = 0`"),
        ([{"function": "mine:a", "weight": float("nan")}], "`task.rewards[0].weight = nan` must be a finite number"),
        ([{"function": "mine:a"}, {"function": "mine:b", "weight": "1"}], "`task.rewards[1].weight"),
        ([{"function": "mine:a", "weight": 1e10}], "`task.rewards[0].weight = 10000000000.0` must be at most"),
        (
            [{"function": "mine:a"}, {"weight": 1.0}],
            "`task.rewards[1]` has none of the keys `function`, `judge` and `model`, of which a table",
        ),
        (
            [{"function": "mine:a", "judge": {}}],
            "`task.rewards[0]` has `function` and `judge`, and a table `[[task.rewards]]` has exactly one of the keys "
            "`function`, `judge` and `model`: write a table for each",
        ),
        (
            [{"model": {"path": "m"}, "batched": True}],
            "`task.rewards[0].batched` is not an option here: it belongs to a table with `function`",
        ),
        ([{"function": "mine.a"}], "`function = 'mine.a'` of the reward `a` is not a function: write it as"),
        ([{"function": "mine:a", "batch_size": 0}], "`task.rewards[0].batch_size = 0` must be at least 1"),
        ([{"function": "mine:a", "name": ""}], '`task.rewards[0].name = ""` must be up to 64 letters, digits, `_`'),
        ([{"function": "mine:a", "name": "a\nb"}], "`task.rewards[0].name"),
        (
            [{"function": "mine:a", "wieght": 1.0}],
            "`task.rewards[0].wieght` is not an option; did you mean `task.rewards.weight`?",
        ),
    ],
)
def test_tables_that_cannot_be_used_are_refused(rewards: list[dict[str, Any]], words: str) -> None:
    assert words in refusal(*rewards)


def test_the_rewards_of_one_of_several_tasks_are_refused_with_its_label() -> None:
    tasks = [{"type": "guess", "label": "guess"}, {"type": "file", "label": "math", "path": "x.jsonl"}]
    for rewards, words in (
        ([{"function": "mine:a", "weight": 0.0}], "`task.math.rewards`: every reward has `weight = 0`"),
        ([{"function": "mine:a"}] * 2, "`task.math.rewards` has 2 rewards with the name `a`"),
        ([{"weight": 2.0}], "`task.math.rewards[0]` has none of the keys `function`, `judge` and `model`"),
    ):
        with pytest.raises(RecipeError) as raised:
            parse_recipe({"model": {"path": "tiny"}, "task": [tasks[0], {**tasks[1], "rewards": rewards}]})
        assert words in str(raised.value)


def test_one_reward_and_several_together_are_refused() -> None:
    said = refusal({"function": "mine:a"}, reward="mine:b")
    assert "`task.reward` and `task.rewards` are both given" in said


def test_several_rewards_count_as_rewards() -> None:
    with pytest.raises(RecipeError, match=r"`task\.reward` is missing"):
        recipe()
    assert recipe({"function": "mine:a"}).evaluation.prompts


def test_names_of_other_systems_lead_to_several_rewards() -> None:
    assert "`task.rewards`" in refusal({"function": "mine:a"}, reward_weights=[1.0])
