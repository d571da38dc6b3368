"""The pages for users of other systems: their names lead to keys of ours, in the pages and in error messages alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from doc_pages import PAGES, ROOT, Block, blocks, is_recipe_key, name_of, named_tests, save, spans, table_rows

import stretto
from stretto.environments.reward_calls import Details, RewardCall, RewardSpec
from stretto.environments.row_sources import load_rows
from stretto.errors import RecipeError
from stretto.recipe.foreign_names import OURS, foreign_hint
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe

FOLDER = ROOT / "docs" / "coming-from"
MAPS = {"trl.md": "TRL", "verl.md": "verl", "prime-rl.md": "prime-rl", "roll.md": "ROLL"}
# Names that are no key of a recipe: arguments of a trainer's constructor, and values in words.
NO_KEYS = {"model", "seed", "tools", "resume", "env", "sampler", "interval", "type", "name", "path"}


ONE_STEP_OF_WARM_START = (
    'path = "tiny"',
    'path = "tiny"\nwarm_start = { steps = 1 }',
)  # for tests, which need no skill


def titled(page: str) -> dict[str, Block]:
    """Returns the blocks of a page that a reader saves, by the names of their files."""
    return {block.title: block for block in blocks(FOLDER / page) if block.title}


def maps(name: str) -> list[tuple[str, list[str], list[str]]]:
    """Returns the rows of a page that map keys: where, their names, and the names in our column."""
    found = []
    for line, cells in table_rows(FOLDER / name):
        theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
        if theirs and not theirs[0].startswith('"'):
            found.append((f"{name}:{line}", theirs, ours))
    return found


@pytest.mark.parametrize("name", MAPS)
def test_every_key_in_our_column_exists(name: str) -> None:
    rows = maps(name)
    assert len(rows) > 25
    keys = [(where, key.partition(" = ")[0]) for where, _, ours in rows for key in ours]
    wrong = [f"{where}: `{key}`" for where, key in keys if "." in key and not is_recipe_key(key)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MAPS)
def test_error_messages_know_every_name_of_the_page_and_agree_with_it(name: str) -> None:
    wrong = []
    for where, theirs, ours in maps(name):
        for key in theirs:
            leaf = key.rpartition(".")[2]
            if leaf in NO_KEYS or any(own.rpartition(".")[2] == leaf for own in ours):
                continue  # it has the same name here, which the messages find by themselves
            if not foreign_hint(leaf):
                wrong.append(f"{where}: no error message knows `{leaf}`")
            elif leaf in OURS and ours and not set(OURS[leaf]) & {own.partition(" = ")[0] for own in ours}:
                wrong.append(f"{where}: for `{leaf}` messages say {OURS[leaf]} and the page says {ours}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if list(named_tests(page))], ids=name_of)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, function in named_tests(page):
        assert re.search(rf"^(?:async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE), (file, function)


def test_the_conversational_reward_of_the_page_scores_the_rows_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = titled("trl.md")
    save(saved["chat_rewards.py"], tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(saved["make_chats.py"].code, {})
    rows = load_rows(tmp_path / "chats.jsonl")
    assert len(rows) == 100
    namespace: dict[str, Any] = {}
    exec(saved["chat_rewards.py"].code, namespace)
    call = RewardCall(RewardSpec("solved", "chat_rewards:solved"), namespace["solved"], {"solution": None})
    asked = [("rendered", "It is 8", row.columns, Details(row.messages)) for row in rows[6:9]]
    assert call.call_batch(asked) == [0.0, 1.0, 0.0]


def test_the_mapped_rows_of_the_page_have_the_number_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(titled("trl.md")["make_train.py"].code, {})
    rows = load_rows(tmp_path / "mapped.jsonl")
    assert len(rows) == 100
    assert rows[6].columns["solution"] == "7"


def test_the_recipe_of_several_passes_trains_groups_twice(tmp_path: Path) -> None:
    code = titled("trl.md")["twice.toml"].code.replace(*ONE_STEP_OF_WARM_START)
    path = tmp_path / "twice.toml"
    path.write_text(code)
    shorter = {"training.steps": 5, "evaluation.prompts": 0, "rollout.max_tokens": 8}
    stretto.train(path, shorter, out=tmp_path / "run", progress=False)
    updates = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    again = [update["replayed_sequences"] for update in updates if "replayed_sequences" in update]
    assert again[0] == 0
    assert again[1] == 8 * 4, "every group of the first update is used again in the second"
    assert {update["optimizer_steps"] for update in updates if "optimizer_steps" in update} == {2}


def test_the_messages_send_users_of_several_passes_to_replay() -> None:
    for name in ("num_iterations", "ppo_epochs"):
        assert "`training.replay = {" in foreign_hint(name)
    with pytest.raises(RecipeError, match=r"training\.replay"):
        load_recipe({"model": {"path": "tiny"}, "training": {"num_iterations": 2}})


def test_two_domains_run_as_two_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = titled("roll.md")
    exec(files["make_domains.py"].code, {})
    save(files["code_reward.py"], tmp_path)
    code = files["domains.toml"].code.replace(*ONE_STEP_OF_WARM_START)
    code, found = re.subn(r"^\[task\.sandbox\].*$", "[task.sandbox]\nstrict = false", code, flags=re.MULTILINE)
    assert found == 1, "some kernels hold only a part of the sandbox"
    Path("domains.toml").write_text(code)
    shorter = {"training.steps": 2, "evaluation.prompts": 0, "rollout.max_tokens": 8}
    stretto.train("domains.toml", shorter, out="run", progress=False)
    updates = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(update["task/math/groups"] for update in updates) == 6
    assert sum(update["task/code/groups"] for update in updates) == 4
    assert sum(update["task/code/failed"] for update in updates) == 0


def test_the_code_reward_of_the_page_runs_the_tests_of_a_row() -> None:
    namespace: dict[str, Any] = {}
    exec(titled("roll.md")["code_reward.py"].code, namespace)
    assert namespace["passes"]("", "def f(): return 3", test_cases="assert f() == 3", tag="KodCode") == 1.0
    assert namespace["passes"]("", "def f(): return 4", test_cases="assert f() == 3") == 0.0
    assert namespace["passes"]("", "no Python", test_cases="assert f() == 3") == 0.0


def test_the_types_with_dual_clip_are_those_of_the_page() -> None:
    (note,) = (cells[2] for _, cells in table_rows(FOLDER / "roll.md") if cells[0] == "`dual_clip_loss`")
    named = set(re.findall(r"`([\w-]+)`", note[note.index("have it: ") :].split(". ")[0]))
    clipped = {
        options.model_fields["type"].default
        for options in get_args(Recipe.model_fields["algorithm"].annotation)
        if "dual_clip" in options.model_fields
    }
    assert named == clipped


@pytest.mark.parametrize("name", MAPS)
def test_every_value_that_a_page_gives_the_algorithm_is_one(name: str) -> None:
    base = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}
    wrong = []
    for where, text in spans(FOLDER / name):
        if found := re.fullmatch(r'algorithm\.(type|advantage|average) = "([\w-]+)"', text):
            try:
                load_recipe(base | {"algorithm": {"type": "grpo", found[1]: found[2]}})
            except RecipeError as error:
                wrong.append(f"{where}: {error}")
    assert not wrong, "\n".join(wrong)


def test_our_column_of_the_defaults_is_true() -> None:
    recipe = load_recipe({"model": {"path": "tiny", "lora": {"rank": 4}}, "task": {"type": "countdown-chain"}})
    ours = {cells[0]: cells[2] for _, cells in table_rows(FOLDER / "trl.md") if len(cells) == 3}
    training, rollout = recipe.training, recipe.rollout
    assert ours["learning rate"] == "1e-5"
    assert training.learning_rate == 1e-5
    assert ours["its schedule"].startswith(training.schedule)
    assert ours["betas of Adam"].startswith(", ".join(map(str, training.betas)))
    assert ours["steps"] == f"{training.steps} updates"
    assert ours["completions of a step"] == f"{rollout.prompts} prompts x {rollout.group}"
    assert ours["length of a completion"] == str(rollout.max_tokens)
    assert ours["alpha of LoRA"] == "2 x rank"
    assert recipe.model.lora is not None
    assert recipe.model.lora.effective_alpha == 2 * 4
    assert ours["rows held out"] == str(recipe.evaluation.prompts)


def test_ten_failures_are_ruled_out() -> None:
    rows = [cells for _, cells in table_rows(FOLDER / "failures.md") if cells[0].isdigit()]
    assert [int(cells[0]) for cells in rows] == list(range(1, 11))
    assert all("https://github.com/" in cells[2] and "::test_" in cells[3] for cells in rows)
