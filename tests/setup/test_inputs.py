"""The inputs of a run: what is said about them before it begins, and what is refused."""

import json

import pytest

from stretto.environments.custom import EnvironmentSpec
from stretto.environments.data import Row
from stretto.environments.tasks import Task
from stretto.errors import RecipeError
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.schema import parse_recipe
from stretto.setup.inputs import check_objective, episode_pool_options, load_inputs, reward_columns


def inputs_of(tmp_path, records, **sections):
    """The inputs of a run on a file with these records, and the recipe."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    task = {"type": "file", "path": str(path), "reward": "reward_functions:as_asked"}
    recipe = parse_recipe({"model": {"path": "tiny"}, "task": task, "evaluation": {"prompts": 0}, **sections})
    return load_inputs(recipe, tiny_tokenizer(), context=2_048, model_path="tiny"), recipe


def said(question):
    return [{"role": "user", "content": question}]


def test_rows_of_both_kinds_are_counted_and_told_of(tmp_path):
    mixed, recipe = inputs_of(tmp_path, [{"prompt": "a"}, {"messages": said("b")}, {"prompt": "c"}] * 6)
    assert mixed.tasks[0].form == "6 made by the chat template and 12 raw text"
    assert not mixed.templated
    assert "two forms; give all rows `messages`, or set `task.system`" in " ".join(mixed.notes(recipe))
    for records, form in (([{"prompt": "a"}], "raw text"), ([{"messages": said("b")}], "made by the chat template")):
        alike, recipe = inputs_of(tmp_path, records * 16)
        assert (alike.tasks[0].form, list(alike.notes(recipe))) == (form, [])


def test_a_role_that_is_no_role_is_refused_with_its_line(tmp_path):
    records = [{"messages": said("a")}, {"messages": [{"role": "usr", "content": "b"}]}]
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: .*the role `usr`, which is no role; did you mean `user`\?"):
        inputs_of(tmp_path, records)


def test_text_that_the_tokenizer_does_not_know_is_told_of(tmp_path):
    found, recipe = inputs_of(tmp_path, [{"prompt": f"plain {i}"} for i in range(20)] + [{"prompt": "caf\u00e9"}])
    (note,) = found.notes(recipe)
    assert note.startswith("1 prompts have text that the tokenizer of `model.path` does not know, such as `\u00e9` in ")
    assert "rows.jsonl:21" in note


def test_more_prompts_than_rows_are_told_of(tmp_path):
    found, recipe = inputs_of(tmp_path, [{"prompt": f"{i}"} for i in range(36)], rollout={"prompts": 1_000})
    (note,) = found.notes(recipe)
    assert "`rollout.prompts = 1000` is more than the 36 rows" in note
    assert "up to 28 times" in note


def test_an_update_of_more_prompts_than_any_run_could_train_on_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"`rollout.prompts = 100000000` must be at most"):
        inputs_of(tmp_path, [{"prompt": "a"}], rollout={"prompts": 100_000_000})


def test_a_custom_objective_is_tried_before_a_run(tmp_path):
    _, recipe = inputs_of(tmp_path, [{"prompt": "a"}] * 16)
    check_objective(recipe)
    algorithm = {"type": "custom", "function": "objective_cases:detached"}
    _, recipe = inputs_of(tmp_path, [{"prompt": "a"}] * 16, algorithm=algorithm)
    with pytest.raises(RecipeError, match=r"`objective_cases:detached` .* returned a loss without a gradient"):
        check_objective(recipe)


def test_a_column_of_a_task_comes_with_the_first_row_that_lacks_it():
    train = [
        Row(text="a", columns={"answer": 1}, where="rows.jsonl:1"),
        Row(text="b", columns={"answer": 2, "level": 3}, where="rows.jsonl:2"),
    ]
    held_out = [Row(text="c", columns={"answer": 4, "source": "x"}, where="held.jsonl:1")]
    task = Task(name="rows.jsonl", train=train, evaluation=held_out, reward="rewards:one")
    assert reward_columns(task) == {"answer": None, "level": "rows.jsonl:1", "source": "rows.jsonl:1"}


@pytest.mark.parametrize(("seconds", "hang_s"), [(None, 450.0), (60.0, 60.0), (0.5, 5.0), (3_600.0, 450.0)])
def test_an_episode_may_block_its_worker_no_longer_than_it_may_take(seconds, hang_s):
    task = {"type": "environment", "path": "rows.jsonl", "environment": "mine:Mine", "turns": 2}
    limit = {} if seconds is None else {"episode_seconds": seconds}
    recipe = parse_recipe({"model": {"path": "tiny"}, "task": {**task, **limit}, "runtime": {"stall_seconds": 900}})
    rows = [Row(text="a", columns={})]
    options = episode_pool_options(recipe, Task("mine", rows, rows, None, EnvironmentSpec("mine:Mine", 2)), None)
    assert options.hang_s == hang_s
    assert ("task.episode_seconds" in options.hang_reason) == (hang_s < 450.0)
