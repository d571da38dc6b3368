"""Search over a folder of text files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from stretto.environments.tools.search import PASSAGE_WORDS, SearchIndex, search_tool
from stretto.errors import RecipeError, RewardError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    docs = tmp_path / "docs"
    (docs / "more").mkdir(parents=True)
    (docs / "owls.txt").write_text("Owls hunt at night. They hear very well.")
    (docs / "more" / "bees.md").write_text("Bees dance.\n" + "filler " * PASSAGE_WORDS + "honey at the end")
    (docs / "image.png").write_bytes(b"owls")
    return docs


def test_the_best_passages_come_first_with_their_files(folder: Path) -> None:
    index = SearchIndex(folder)
    assert index.search("hunting owl") == [("owls.txt", "Owls hunt at night. They hear very well.")]
    [(file, passage)] = index.search("honey")
    assert (file, passage[-16:], "dance" in passage) == (os.path.join("more", "bees.md"), "honey at the end", False)
    assert [file for file, _ in index.search("night OR bees")] == ["owls.txt", os.path.join("more", "bees.md")]


@pytest.mark.parametrize(
    "query", ["", '"', "* - ( NEAR", "owls AND (", 'file:"x"', "zebra", "-" * 9_999, "\ud800", "\0"]
)
def test_any_text_is_a_query(folder: Path, query: str) -> None:
    assert asyncio.run(search_tool(folder).call({"query": query})).startswith(("Nothing was found.", "[owls.txt]"))


def test_the_index_is_made_once_and_again_when_a_file_changes(folder: Path) -> None:
    first = SearchIndex(folder)
    made = first.path.stat().st_ino
    assert SearchIndex(folder).path.stat().st_ino == made
    (folder / "cats.txt").write_text("Cats sleep.")
    again = SearchIndex(folder)
    assert [file for file, _ in again.search("cats")] == ["cats.txt"]
    assert [path.name for path in again.path.parent.iterdir()] == [again.path.name], "nothing is left behind"
    assert SearchIndex(folder, index=folder / "own.sqlite").search("cats")


def test_a_folder_without_text_and_an_index_that_is_gone_are_errors_that_say_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="no text files"):
        SearchIndex(tmp_path / "empty")
    with pytest.raises(RecipeError, match="is no folder"):
        SearchIndex(tmp_path / "nowhere")
    tool = search_tool(folder, index=tmp_path / "index.sqlite")
    (tmp_path / "index.sqlite").unlink()
    with pytest.raises(RewardError, match="cannot be read"):
        asyncio.run(tool.call({"query": "owls"}))
