"""Runs that learn from a teacher: without a reward, beside one, and with everything that a run must keep."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Dies
from run_cases import Heard, assert_verifies, policy, recipe, run

from stretto.assembly.check import check
from stretto.assembly.recompute import recompute
from stretto.assembly.retrain import retrain
from stretto.errors import ModelError, RecipeError

QUIET = "evaluation.prompts=0"
ALONE = ("algorithm.type=distill", "task.reward=", QUIET)


@pytest.fixture
def teacher(model: Path, tmp_path: Path) -> Path:
    """A run whose policy is far from its base."""
    folder = tmp_path / "teacher"
    run(recipe(model, tmp_path, QUIET, "training.steps=4", "training.learning_rate=2e-2"), folder)
    return folder


def taught_by(path: Path | str, **options: Any) -> str:
    values = "".join(f", {name} = {json.dumps(value)}" for name, value in options.items())
    return f'algorithm.teachers=[{{path = "{path}"{values}}}]'


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# All weights of noise learn more slowly.
@pytest.mark.parametrize(("lora", "share"), [(True, 0.1), pytest.param(False, 0.5, marks=pytest.mark.slow)])
def test_a_run_without_a_reward_comes_near_to_its_teacher_and_verifies_and_replays(
    model: Path, tmp_path: Path, teacher: Path, lora: bool, share: float
) -> None:
    folder = tmp_path / "student"
    steps = ("training.steps=40", f"training.learning_rate={5e-3 if lora else 2e-3}", "rollout.prompts=8")
    run(recipe(model, tmp_path, *ALONE, taught_by(teacher / "policy"), *steps, lora=lora), folder)
    made = lines(folder)
    assert min(line["teacher_kl"] for line in made[-5:]) < share * made[0]["teacher_kl"]
    assert made[-1]["teacher_agreement"] > made[0]["teacher_agreement"]
    told = {kind for line in made for kind in line["not_learning"]}
    assert not told & {"reward-constant", "no-signal", "little-signal"}, "equal rewards say nothing where none trains"
    assert "groups_without_signal" not in made[0]
    assert_verifies(folder)
    assert retrain(folder).difference is None
    assert not recompute(folder, 4).breaks


def test_a_run_that_was_killed_goes_on_with_its_teacher_and_ends_with_the_same_policy(
    model: Path, tmp_path: Path, teacher: Path
) -> None:
    made = recipe(model, tmp_path, *ALONE, taught_by(teacher), "rollout.paradigm=synchronous")
    run(made, tmp_path / "whole")
    with pytest.raises(KeyError):
        run(made, tmp_path / "killed", observer=Dies(at=1))
    assert run(made, tmp_path / "killed", resume=True)["steps"] == 3
    assert_verifies(tmp_path / "killed")
    whole, killed = policy(tmp_path / "whole"), policy(tmp_path / "killed")
    assert all((whole[name] == killed[name]).all() for name in whole)


def test_a_teacher_that_has_changed_is_said_and_the_run_goes_on(model: Path, tmp_path: Path, teacher: Path) -> None:
    made = recipe(model, tmp_path, *ALONE, taught_by(teacher), "training.steps=1")
    run(made, tmp_path / "run")
    other = recipe(model, tmp_path, QUIET, "training.steps=1", "training.learning_rate=2e-2")
    shutil.rmtree(teacher)
    run(other, teacher)
    heard, same = Heard(), Heard()
    said = f"the files of `{teacher}` have changed since the run used them last: it is another model now"
    for steps, observer in ((2, heard), (3, same)):
        longer = recipe(model, tmp_path, *ALONE, taught_by(teacher), f"training.steps={steps}")
        run(longer, tmp_path / "run", resume=True, observer=observer)
    assert (said in heard.said, said in same.said) == (True, False)
    assert_verifies(tmp_path / "run")


@pytest.mark.parametrize("options", [{"form": "sampled"}, {"top_k": 5}, {"coefficient": 0.1, "keep": "host"}])
def test_a_teacher_teaches_beside_a_reward_in_every_form(
    model: Path, tmp_path: Path, teacher: Path, options: dict[str, Any]
) -> None:
    folder = tmp_path / "both"
    run(recipe(model, tmp_path, taught_by(teacher / "policy", **options), QUIET), folder)
    assert all("teacher_kl" in line and "advantage_mean" in line for line in lines(folder))
    assert_verifies(folder)
    assert retrain(folder).difference is None


def test_a_whole_model_and_the_models_own_path_are_teachers_too(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "same"
    run(recipe(model, tmp_path, *ALONE, taught_by(model), "training.steps=1"), folder)
    (line,) = lines(folder)
    assert abs(line["teacher_kl"]) < 1e-6
    assert line["teacher_agreement"] == 1.0


def test_the_memory_plan_has_the_teacher(model: Path, tmp_path: Path, teacher: Path) -> None:
    shared = str(check(recipe(model, tmp_path, *ALONE, taught_by(teacher))))
    whole = str(check(recipe(model, tmp_path, *ALONE, taught_by(model))))
    sizes = [float(found[1]) for text in (shared, whole) if (found := re.search(r"teachers ([\d.]+) MiB", text))]
    assert len(sizes) == 2
    assert sizes[0] < 0.2 * sizes[1], "an adapter of the policy's base is not a second model"
    assert "teachers" not in check(recipe(model, tmp_path)).memory


def other_tokenizer(model: Path, folder: Path) -> Path:
    """The model with two tokens that changed places."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    found = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(found))
    return folder


def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    other = other_tokenizer(model, tmp_path / "other")
    for change, error, said in (
        (taught_by(other), RecipeError, r"has another tokenizer than `model\.path.*2 of 99 tokens have other numbers"),
        (taught_by("./nowhere"), ModelError, r"`algorithm\.teachers\[0\]\.path = './nowhere'`: there is no folder"),
        (taught_by(tmp_path), ModelError, r"is no model: the folder has no `config\.json`"),
        (taught_by(model, top_k=100), RecipeError, r"`algorithm\.teachers\[0\]\.top_k = 100` is more than the vocabu"),
    ):
        made = recipe(model, tmp_path, *ALONE, change)
        with pytest.raises(error, match=said):
            check(made)
        with pytest.raises(error, match=said):
            run(made, tmp_path / "refused")
        assert not (tmp_path / "refused" / "journal.sqlite").exists()
