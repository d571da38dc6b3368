"""Recipes that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto
from stretto.cli import main
from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe
from stretto.recipe.shipped_recipes import FOLDER, found, names

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_recipe_of_the_repository_is_shipped() -> None:
    assert names() == sorted(path.stem for path in RECIPES.glob("*.toml"))
    assert "quickstart" in names()


def test_a_name_is_a_shipped_recipe_unless_there_is_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(Path("quickstart")) == FOLDER / "quickstart.toml"
    assert load_recipe("quickstart") == load_recipe(RECIPES / "quickstart.toml")
    (tmp_path / "quickstart").mkdir()
    assert found(Path("quickstart")) == FOLDER / "quickstart.toml", "a run folder may have the name"
    (tmp_path / "dapo").write_text("")
    assert found(Path("dapo")) == Path("dapo")
    for path in ("quickstart.toml", "recipes/quickstart", "nothing"):
        assert found(Path(path)) == Path(path)


def test_a_recipe_that_does_not_exist_names_the_shipped_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for typed in ("quikstart", "recipes/quickstart.toml"):
        assert main(["check", typed]) == 2
        assert f"recipe `{typed}` does not exist; `quickstart` is one that comes with" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"recipe `nothing-like-it.toml` does not exist$"):
        load_recipe("nothing-like-it.toml")


def test_a_shipped_recipe_takes_rows_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}=", "answer": number} for number in range(400)]

    def reward(prompt: str, completion: str, answer: int) -> float:
        return float(completion == str(answer))

    for recipe in ("quickstart", RECIPES / "quickstart.toml"):
        report = stretto.check(recipe, {"training.steps": 40}, reward=reward, data=rows)
        assert "python:data@" in str(report)
