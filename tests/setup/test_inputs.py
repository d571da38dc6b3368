"""The inputs of a run: what is said about them before it begins, and what is refused."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stretto.environments.custom import EnvironmentSpec
from stretto.environments.data import PromptStream, Row
from stretto.environments.rows import count_shared
from stretto.environments.tasks import Task
from stretto.errors import RecipeError
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.reading import parse_recipe
from stretto.setup.inputs import (
    check_objective,
    episode_pool_options,
    load_inputs,
    prompt_tokenizer,
    reward_columns,
)


def inputs_of(tmp_path, records, options=None, **sections):
    """The inputs of a run on a file with these records, and the recipe. `options` are those of the task."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    task = {"type": "file", "path": str(path), "reward": "reward_functions:as_asked", **(options or {})}
    recipe = parse_recipe({"model": {"path": "tiny"}, "task": task, "evaluation": {"prompts": 0}, **sections})
    tokenizer = prompt_tokenizer(recipe, tiny_tokenizer())
    return load_inputs(recipe, tokenizer, context=2_048, model_path="tiny"), recipe


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


PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer_of(*tasks):
    """The tokenizer that what is alike for these tasks is asked with, and that of the model."""
    labelled = [{"label": f"task{number}", **task} for number, task in enumerate(tasks)]
    own = tiny_tokenizer()
    return prompt_tokenizer(parse_recipe({"model": {"path": "tiny"}, "task": labelled}), own), own


def test_the_template_of_a_mixture_is_that_of_the_tasks_that_chat(tmp_path):
    chats = {"type": "file", "path": "rows.jsonl", "reward": "a:b"}
    found, own = tokenizer_of({**chats, "chat_template": PLAIN}, {"type": "guess"}, {"type": "countdown-chain"})
    assert found.chat_template == PLAIN != own.chat_template, "tasks that never chat have no say"
    found, own = tokenizer_of({**chats, "chat_template": PLAIN}, {**chats, "chat_template": PLAIN})
    assert found.chat_template == PLAIN
    found, own = tokenizer_of({**chats, "chat_template": PLAIN}, chats)
    assert found is own, "they differ"
    found, own = tokenizer_of({"type": "guess"}, {"type": "countdown-chain"})
    assert found is own


def test_what_is_refused_of_one_of_several_tasks_is_named_by_its_label(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 8)
    file = {"type": "file", "path": str(path), "reward": "a:b", "label": "file"}
    guess = {"type": "guess", "label": "guess"}

    def refusal(*tasks, context=2_048, limits=None, **sections):
        recipe = parse_recipe(
            {"model": {"path": "tiny"}, "task": list(tasks), "evaluation": {"prompts": 1}, **sections}
        )
        with pytest.raises(RecipeError) as caught:
            load_inputs(recipe, tiny_tokenizer(), context=context, model_path="tiny", prompt_limits=limits)
        return str(caught.value)

    assert refusal(guess, {**file, "path": "none.jsonl"}).startswith("task `file`: `none.jsonl` is not a file")
    assert refusal(guess, {**file, "chat_template": "none.jinja"}).startswith("task `file`: `task.chat_template = ")
    long = refusal(guess, {**file, "max_tokens": 64}, context=48, rollout={"max_tokens": 64})
    assert long.startswith("task `guess`: `rollout.max_tokens = 64` leaves no room for a prompt")
    short = {"rollout": {"max_tokens": 64}, "evaluation": {"prompts": 1, "max_tokens": 8}}
    own = refusal({**guess, "max_tokens": 8}, {**file, "max_tokens": 64}, context=48, **short)
    assert own.startswith("task `file`: `task.file.max_tokens = 64` leaves no room for a prompt")
    assert refusal(guess, file, limits={"file": 9_999}).startswith("task `file`: the run began with prompts of up to")


def test_a_role_that_is_no_role_is_refused_with_its_line(tmp_path):
    records = [{"messages": said("a")}, {"messages": [{"role": "usr", "content": "b"}]}]
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: .*the role `usr`, which is no role; did you mean `user`\?"):
        inputs_of(tmp_path, records)


def test_text_that_the_tokenizer_does_not_know_is_told_of(tmp_path):
    found, recipe = inputs_of(tmp_path, [{"prompt": f"plain {i}"} for i in range(20)] + [{"prompt": "caf\u00e9"}])
    (note,) = found.notes(recipe)
    assert note.startswith("1 prompts have text that the tokenizer of `model.path` does not know, such as `\u00e9` in ")
    assert "rows.jsonl:21" in note


def test_an_unknown_token_that_only_the_model_of_the_tokenizer_names_is_seen_too():
    inner = Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.unk_token_id is None
    rows = [Row(text="ab"), Row(text="a\u2603b", where="rows.jsonl:2")]
    stream = PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=8)
    assert (stream.num_unknown, stream.first_unknown) == (1, "`\u2603` in rows.jsonl:2")


def test_held_out_prompts_that_are_trained_on_too_are_counted(tmp_path):
    some = {"evaluation": {"prompts": 4}}
    found, recipe = inputs_of(tmp_path, [{"prompt": "same", "answer": i} for i in range(40)], **some)
    (note,) = found.notes(recipe)
    assert note.startswith("4 of 4 held-out prompts of ")
    assert "are also among its training prompts" in note
    found, recipe = inputs_of(tmp_path, [{"messages": said("same")}] * 40, **some)
    assert "4 of 4 held-out prompts" in next(found.notes(recipe))
    found, recipe = inputs_of(tmp_path, [{"prompt": f"number {i}"} for i in range(40)], **some)
    assert list(found.notes(recipe)) == []
    path = str(tmp_path / "rows.jsonl")
    found, recipe = inputs_of(tmp_path, [{"prompt": f"{i}"} for i in range(40)], {"evaluation_path": path}, **some)
    assert "held-out prompts of" in next(found.notes(recipe))


def test_prompts_are_shared_by_their_messages_and_for_environments_by_their_columns_too():
    train = [Row(messages=tuple(said("a")), columns={"n": 1}), Row(text="b")]
    held_out = [Row(messages=tuple(said("a")), columns={"n": 2}), Row(text="a"), Row(text="b")]
    assert count_shared(train, held_out) == 2
    assert count_shared(train, held_out, by_columns=True) == 1
    system = [Row(messages=({"role": "system", "content": "s"}, *said("a")))]
    assert count_shared(train, system) == 0


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


# -- chat templates and long prompts -----------------------------------------------------------------------------------


def test_a_prefill_is_the_end_of_every_prompt_of_messages(tmp_path):
    found, _ = inputs_of(tmp_path, [{"prompt": "2+2="}] * 4, {"system": "Add.", "prefill": "<think>"})
    assert found.prompts.prompt(0).text == "system: Add.\nuser: 2+2=\nassistant: <think>"


def test_a_prefill_of_raw_text_is_refused(tmp_path):
    records = [{"prompt": "a"}, {"messages": said("b")}]
    with pytest.raises(RecipeError, match=r"`task.prefill = '<think>'` follows the chat template, and 1 of 2 rows of"):
        inputs_of(tmp_path, records, {"prefill": "<think>"})


@pytest.mark.parametrize("options", [{"chat_template": "{{ messages[0].content }}"}, {"template": {"message": 1}}])
def test_a_chat_template_without_effect_is_refused(tmp_path, options):
    (key,) = options
    with pytest.raises(RecipeError, match=rf"`task.{key}` has no effect: all rows of .* are raw text"):
        inputs_of(tmp_path, [{"prompt": "a"}] * 2, options)
    inputs_of(tmp_path, [{"prompt": "a"}, {"messages": said("b")}], options)


def test_prompts_that_are_dropped_or_cut_are_told_of(tmp_path):
    records = [{"prompt": "x" * (2_000 if number == 3 else 5)} for number in range(10)]
    dropped, recipe = inputs_of(tmp_path, records, {"too_long": "drop"}, rollout={"prompts": 2})
    (note,) = dropped.notes(recipe)
    assert note.startswith("1 prompts of ")
    assert 'have more than 1,792 tokens and are left out (`task.too_long = "drop"`): ' in note
    assert note.endswith("rows.jsonl:4 (2,000 tokens)")
    assert (dropped.prompts.num_rows, dropped.tasks[0].prompt_limit, dropped.longest_prompt) == (9, 1_792, 5)
    cut, recipe = inputs_of(tmp_path, records, {"too_long": "truncate"}, rollout={"prompts": 2})
    assert "and are cut at their beginning" in next(cut.notes(recipe))
    assert (cut.prompts.num_rows, cut.longest_prompt) == (10, 1_792)
    refusing, _ = inputs_of(tmp_path, records[:3])
    assert refusing.tasks[0].prompt_limit == 0


def test_an_agent_does_not_cut_prompts_and_is_told_what_it_can_do(tmp_path):
    records = [{"prompt": "x" * 2_000}] * 2
    options = {"type": "agent", "command": ["true"], "reward": "posted"}
    with pytest.raises(RecipeError, match=r'or set `task.too_long = "drop"`$'):
        inputs_of(tmp_path, records, options)
    with pytest.raises(RecipeError, match=r'`task.too_long = "truncate"` must be "refuse" or "drop"'):
        inputs_of(tmp_path, records, {**options, "too_long": "truncate"})
