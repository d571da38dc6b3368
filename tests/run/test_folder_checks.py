"""What is said of a recipe that is not the one that a run began with, and of a place that no run can begin in."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import RunError
from stretto.recipe.schema import load_recipe, parse_recipe
from stretto.run.folder_checks import refuse_another_recipe, refuse_occupied

RECIPE = """
[model]
path = "tiny"
lora = { rank = 4 }
[task]
type = "countdown-chain"
[rollout]
staleness = 3
[training]
steps = 100
[evaluation]
every = 20
"""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["training.steps=10"], ["`training.steps` is 10, and the run in `.` was started with 100"]),
        (
            ["rollout.paradigm=synchronous"],
            ["`rollout.paradigm` is 'synchronous', and the run in `.` was started with 'multi-version'"],
        ),
        (["algorithm.type=cispo"], ["`algorithm.type` is 'cispo', and the run in `.` was started with 'grpo'"]),
        (["rollout.staleness="], ["`rollout.staleness` is left out, and the run in `.` was started with 3"]),
        (["rollout.rows=8"], ["`rollout.rows` is 8, and the run in `.` was started without it"]),
        (
            ["seed=1", "evaluation.every="],
            [
                "`evaluation.every` is 0, and the run in `.` was started with 20",
                "`seed` is 1, and the run in `.` was started with 0",
            ],
        ),
    ],
)
def test_only_what_is_another_is_told_and_not_what_follows_from_it(
    overrides: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("recipe.toml")
    path.write_text(RECIPE)
    Path("config.toml").write_text(load_recipe(path).dumps())
    refuse_another_recipe(load_recipe(path, ["runtime.stall_seconds=5"]), Path())
    with pytest.raises(RunError) as refused:
        refuse_another_recipe(load_recipe(path, overrides), Path())
    first, *lines, last = str(refused.value).splitlines()
    assert first == "this is another recipe:"
    assert [line.strip() for line in lines] == told
    assert "go on with the recipe that it was started with" in last


def test_variables_to_pass_may_change_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("recipe.toml")
    path.write_text(RECIPE)
    begun = load_recipe(path).dumps()
    assert "pass_env = []\n" in begun
    for was in (begun, begun.replace("pass_env = []\n", "")):  # one that was begun before there was the key
        Path("config.toml").write_text(was)
        refuse_another_recipe(load_recipe(path, ['task.pass_env=["OUR_KEY"]']), Path())
        refuse_another_recipe(load_recipe(path), Path())


@pytest.mark.parametrize("damaged", [b"[[[", b"\xff\xfe"])
def test_a_run_whose_recipe_is_damaged_is_refused_by_its_name(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(damaged)
    with pytest.raises(RunError, match=r"config.toml`, the recipe that the run was started with, cannot be read"):
        refuse_another_recipe(parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}), tmp_path)


def test_a_place_that_cannot_be_written_to_is_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_occupied(tmp_path / "new" / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"nothing can be written to `.*/file`; choose another `--out`"):
        refuse_occupied(tmp_path / "file" / "run")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(RunError, match="nothing can be written to"):
        refuse_occupied(tmp_path / "new" / "run")


def test_a_run_goes_on_with_what_auto_became_and_without_keys_that_are_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("recipe.toml")
    path.write_text(RECIPE)
    begun = load_recipe(path, ["training.micro_tokens=4096", 'model.dtype="float32"']).dumps()
    assert "greedy = false\n" in begun
    Path("config.toml").write_text(begun.replace("greedy = false\n", ""))
    refuse_another_recipe(load_recipe(path), Path())
    refuse_another_recipe(load_recipe(path, ["training.micro_tokens=2048"]), Path())
    for override in ('model.dtype="bfloat16"', "evaluation.greedy=true"):
        with pytest.raises(RunError, match=override.partition("=")[0]):
            refuse_another_recipe(load_recipe(path, [override]), Path())


def test_worker_processes_of_an_environment_may_change_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\npath = "tiny"\n[task]\ntype = "environment"\npath = "p.jsonl"\nenvironment = "m:C"\nturns = 2\n'
    )
    (tmp_path / "config.toml").write_text(load_recipe(path).dumps())
    changed = ["task.workers=0"], ["task.workers=3", "task.worker_gib=2.0", "task.worker_episodes=9"]
    for overrides in changed:
        refuse_another_recipe(load_recipe(path, overrides), Path())
    with pytest.raises(RunError, match=r"task\.budget"):
        refuse_another_recipe(load_recipe(path, ["task.budget=2.0"]), Path())
