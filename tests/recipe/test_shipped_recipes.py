"""Recipes that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto
from stretto.cli import main
from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe
from stretto.recipe.shipped_recipes import FOLDER, MADE_BY, found, names

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
    with pytest.raises(RecipeError, match=r"recipe `zzz` does not exist; those that come with .*, `quickstart`, "):
        load_recipe("zzz")


def test_a_shipped_recipe_takes_rows_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}=", "answer": number} for number in range(400)]

    def reward(prompt: str, completion: str, answer: int) -> float:
        return float(completion == str(answer))

    for recipe in ("quickstart", RECIPES / "quickstart.toml"):
        report = stretto.check(recipe, {"training.steps": 40}, reward=reward, data=rows)
        assert "python:data@" in str(report)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a checkout of the repository has, without data and models."""
    (tmp_path / "recipes").symlink_to(RECIPES)
    (tmp_path / "Makefile").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("recipes/gsm8k-small.toml", "`make gsm8k` makes it"),
        ("gsm8k", "`make gsm8k` makes it"),
        ("bfcl", "`python -m stretto.environments.adapters.bfcl --out data/bfcl` makes it"),
        ("agent", "`recipes/agent.toml` says how to get its files"),
    ],
)
def test_in_a_checkout_the_command_that_makes_the_data_is_named(checkout: Path, recipe: str, command: str) -> None:
    with pytest.raises(RecipeError) as error:
        stretto.check(recipe)
    assert command in str(error.value)
    assert "go there" not in str(error.value)


@pytest.mark.parametrize("key", ["path", "evaluation_path"])
def test_a_missing_file_that_an_override_names_is_not_one_that_the_recipe_needs(
    checkout: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        (checkout / "data" / "gsm8k" / f"{split}.jsonl").touch()
    assert main(["check", "recipes/gsm8k-small.toml", "--set", f"task.{key}=data/none.jsonl"]) == 2
    said = capsys.readouterr().err
    assert f"`task.{key} = 'data/none.jsonl'`: there is no such file (seen from {checkout})" in said
    assert "needs" not in said


def test_every_data_folder_of_a_shipped_recipe_has_a_command_that_makes_it() -> None:
    for name in names():
        recipe = load_recipe(name)
        files = [getattr(task, key, None) for task in recipe.tasks for key in ("path", "evaluation_path")]
        for file in files:
            if isinstance(file, str) and file.startswith("data/"):
                assert str(Path(file).parent) in MADE_BY, name
