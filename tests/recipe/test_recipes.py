"""Every shipped recipe parses, and those on the tiny model make an update."""

import json
from pathlib import Path

import pytest
from run_cases import assert_verifies, run

from stretto.objectives import OBJECTIVES
from stretto.recipe.reading import load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
ON_TINY = [path for path in RECIPES if load_recipe(path).model.path == "tiny"]

SMALL = (
    "model.warm_start={steps = 0}",
    "task.size=64",
    "rollout.prompts=4",
    "rollout.group=2",
    "rollout.max_tokens=6",
    "training.steps=1",
    "evaluation.prompts=0",
    'runtime.device="cpu"',
    "runtime.engine_threads=1",
    "runtime.trainer_threads=1",
)
FROM_FILES = {"agent"}  # whose task has as many rows as its file
PUNISHED = {"dapo": ("algorithm.length.cache=3",)}  # of completions of six tokens
TAUGHT = {"distill": ('algorithm.teachers=[{path = "tiny"}]',)}  # by itself, instead of another run's policy
MIXED = {"mixture": ("task.chain.size=64", "task.guess.size=64", "task.guess.max_tokens=")}
PLACED = {"ray": ("runtime.address=local",)}  # not on whatever cluster this machine has
FILTERED = {"dapo": ("rollout.filter_limit=1",)}  # an untrained policy earns nothing, so every group would be filtered


def test_there_is_a_recipe_for_each_family_of_objectives() -> None:
    shipped = {load_recipe(path).algorithm.type for path in RECIPES}
    alike = {"naive": "rloo", "reinforce": "rloo", "tis": "cispo", "custom": "grpo"}  # shown by another of its family
    assert {alike.get(name, name) for name in OBJECTIVES} <= shipped


@pytest.mark.parametrize("path", ON_TINY, ids=lambda path: path.stem)
def test_a_recipe_on_the_tiny_model_makes_an_update(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # made once for all of them
    small = [change for change in SMALL if path.stem not in {*FROM_FILES, *MIXED} or not change.startswith("task.size")]
    changes = (*small, *PUNISHED.get(path.stem, ()), *FILTERED.get(path.stem, ()), *PLACED.get(path.stem, ()))
    changes += (*TAUGHT.get(path.stem, ()), *MIXED.get(path.stem, ()))
    recipe = load_recipe(path, changes)
    summary = run(recipe, tmp_path / "run")
    assert summary["steps"] == 1
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["optimizer_steps"] == recipe.training.optimizer_steps
    assert_verifies(tmp_path / "run")
