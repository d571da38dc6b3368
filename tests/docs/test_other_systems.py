"""The pages for users of other systems: their names lead to keys of ours, in the pages and in error messages alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT, blocks, is_recipe_key, name_of, named_tests, save, table_rows

from stretto.environments.reward_calls import Details, RewardCall, RewardSpec
from stretto.environments.row_sources import load_rows
from stretto.recipe.foreign_names import OURS, foreign_hint

FOLDER = ROOT / "docs" / "coming-from"
MAPS = {"trl.md": "TRL", "verl.md": "verl", "prime-rl.md": "prime-rl", "roll.md": "ROLL"}
# Names that are no key of a recipe: arguments of a trainer's constructor, and values in words.
NO_KEYS = {"model", "seed", "tools", "resume", "env", "sampler", "interval", "type", "name", "path"}


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
    saved = {block.title: block for block in blocks(FOLDER / "trl.md", "python") if block.title}
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


def test_ten_failures_are_ruled_out() -> None:
    rows = [cells for _, cells in table_rows(FOLDER / "failures.md") if cells[0].isdigit()]
    assert [int(cells[0]) for cells in rows] == list(range(1, 11))
    assert all("https://github.com/" in cells[2] and "::test_" in cells[3] for cells in rows)
