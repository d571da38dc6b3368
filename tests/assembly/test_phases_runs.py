"""Runs that go on with another recipe: longer, with another learning rate, with another bound of staleness."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Dies, Stops, train_and_kill
from run_cases import Heard, assert_verifies, equal, policy, recipe, rows, run, story

from stretto.assembly.recompute import recompute
from stretto.assembly.retrain import retrain
from stretto.cli import main
from stretto.errors import RunError
from stretto.run.folder_checks import standing
from stretto.store.verify import exit_code, format_findings, verify

RATES = "SELECT json_extract(metrics, '$.learning_rate') FROM updates ORDER BY update_id"
PHASES = "SELECT phase, first_update, first_group FROM phases"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit(folder: Path, change: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as db:
        db.execute(change)
        db.commit()


def broken(folder: Path) -> str:
    findings = verify(folder)
    assert exit_code(findings) == 1
    return format_findings(findings)


def test_a_finished_run_goes_on_at_half_the_rate_is_killed_resumed_verified_and_replayed(
    model: Path, tmp_path: Path
) -> None:
    folder, quiet = tmp_path / "run", "evaluation.prompts=0"
    assert run(recipe(model, tmp_path, quiet), folder)["steps"] == 3
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000003"]
    assert standing(folder) == "finished"
    before = contents(folder)
    with pytest.raises(RunError, match=r"is finished with 3 updates.*`--set training\.steps=6`"):
        run(recipe(model, tmp_path, quiet, "training.learning_rate=0.1"), folder, resume=True)
    assert contents(folder) == before

    longer = recipe(model, tmp_path, quiet, "training.steps=7", "training.learning_rate=5e-4")
    dies = Dies(at=4)
    with pytest.raises(KeyError):
        run(longer, folder, resume=True, observer=dies)
    assert "from update 3 on: `training.learning_rate` 0.001 -> 0.0005, `training.steps` 3 -> 7" in dies.said
    assert standing(folder) == "stopped"
    assert_verifies(folder)
    heard = Heard()
    assert run(longer, folder, resume=True, observer=heard)["steps"] == 7
    assert not [text for text in heard.said if "from update" in text]
    assert "recipes of 2 phases" in assert_verifies(folder)
    assert rows(folder, PHASES) == [(0, 0, 0), (1, 3, 9)]
    assert rows(folder, RATES) == [(0.001,)] * 3 + [(0.0005,)] * 4
    assert "steps = 7" in (folder / "config.toml").read_text()
    assert retrain(folder).difference is None
    assert not recompute(folder, 5).breaks
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000007"]


def test_an_edited_phase_or_configuration_is_found(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(recipe(model, tmp_path, "evaluation.prompts=0"), folder)
    whole, config = (folder / "journal.sqlite").read_bytes(), (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("learning_rate = 0.001", "learning_rate = 0.002"))
    assert "`training.learning_rate` is 0.002 in `config.toml`, and 0.001 in the recipe of phase 0" in broken(folder)
    edit(folder, "UPDATE phases SET recipe = REPLACE(recipe, 'learning_rate = 0.001', 'learning_rate = 0.002')")
    assert "the digest of update 0 does not follow" in broken(folder)
    (folder / "config.toml").write_text(config.replace('device = "cpu"', 'device = "cuda"'))
    (folder / "journal.sqlite").write_bytes(whole)
    assert_verifies(folder)
    edit(folder, "UPDATE phases SET first_update = 1")
    assert "phase 0 begins with update 1" in broken(folder)


def test_a_run_of_two_phases_is_what_a_run_of_one_is_if_only_its_length_changed(model: Path, tmp_path: Path) -> None:
    options = 'rollout.paradigm="synchronous"', "evaluation.every=2"
    run(recipe(model, tmp_path, *options, "training.steps=5"), tmp_path / "whole")
    run(recipe(model, tmp_path, *options), tmp_path / "parts")
    summary = run(recipe(model, tmp_path, *options, "training.steps=5"), tmp_path / "parts", resume=True)
    assert story(tmp_path / "parts") == story(tmp_path / "whole")
    assert equal(policy(tmp_path / "parts"), policy(tmp_path / "whole"))
    evaluated = [(each["version"], each["moment"]) for each in summary["evaluations"]]
    assert evaluated == [(0, "before"), (2, "during"), (3, "after"), (4, "during"), (5, "after")]
    assert_verifies(tmp_path / "parts")


def test_without_its_last_checkpoint_a_run_goes_on_too(model: Path, tmp_path: Path) -> None:
    options = 'rollout.paradigm="synchronous"', "evaluation.prompts=0", "runtime.final_checkpoint=false"
    run(recipe(model, tmp_path, *options), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    heard = Heard()
    run(recipe(model, tmp_path, *options, "training.steps=4"), tmp_path / "run", resume=True, observer=heard)
    assert "updates 0 to 2 are trained again from the journal, as they were recorded" in heard.said
    assert_verifies(tmp_path / "run")


def stopped(made: Any, folder: Path, at: int) -> None:
    """Runs until an update, and stops there."""
    assert run(made, folder, observer=Stops(at))["stopped"]


@pytest.mark.parametrize("bounds", [(4, 1), (1, 4), (3, "auto")])
def test_a_stopped_run_goes_on_with_another_bound(model: Path, tmp_path: Path, bounds: tuple[int, Any]) -> None:
    folder, options = tmp_path / "run", ("evaluation.prompts=0", "training.steps=14")
    first = recipe(model, tmp_path, *options, f"rollout.staleness={bounds[0]}", "rollout.in_flight=full")
    stopped(first, folder, 4)
    (groups,) = rows(folder, "SELECT COUNT(*) FROM groups")[0]
    second = recipe(model, tmp_path, *options, f"rollout.staleness={json.dumps(bounds[1])}")
    heard = Heard()
    assert run(second, folder, resume=True, observer=heard)["steps"] == 14
    assert any(f"`rollout.staleness` {bounds[0]} -> {bounds[1]}" in text for text in heard.said)
    assert_verifies(folder)
    assert retrain(folder).difference is None
    later = [k for (k,) in rows(folder, f"SELECT staleness FROM groups WHERE group_id >= {groups} ORDER BY group_id")]
    assert later
    if bounds[1] != "auto":
        assert set(later) == {bounds[1]}, "groups that are admitted later have the new bound"
    if bounds == (4, 1):
        edit(folder, "UPDATE groups SET staleness = 4, deadline = version + 4 WHERE group_id = 41")
        assert "group 41 was admitted under staleness 4, the run allows 1" in broken(folder)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.steps=4"], r"`training\.steps = 4` is too few: the run in .* has done \d updates"),
        (["rollout.temperature=0.5"], r"`rollout\.temperature` is 0\.5, .* was started with 1\.0: trajectories in"),
        (["rollout.group=2"], r"`rollout\.group` is 2, .*: the numbers of trajectories"),
    ],
)
def test_what_cannot_change_is_refused_and_nothing_of_the_run_is_changed(
    model: Path, tmp_path: Path, overrides: list[str], named: str
) -> None:
    options = "evaluation.prompts=0", "training.steps=9"
    stopped(recipe(model, tmp_path, *options), tmp_path / "run", 4)
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=named):
        run(recipe(model, tmp_path, *options, *overrides), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_a_negative_learning_rate_is_refused_by_name_at_the_command_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe(model, tmp_path, "evaluation.prompts=0"), tmp_path / "run")
    before = contents(tmp_path / "run")
    command = ["train", "recipe.toml", "--out", str(tmp_path / "run"), "--resume", "--set", "evaluation.prompts=0"]
    assert main([*command, "--set", "training.steps=4", "--set", "training.learning_rate=-1.0"]) == 2
    assert "training.learning_rate" in capsys.readouterr().err
    assert main(command) == 2
    assert "is finished with 3 updates, so there is nothing to resume: to extend it" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_second_phase_leaves_a_run_that_goes_on(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(recipe(model, tmp_path, "evaluation.prompts=0"), folder)
    changed = "evaluation.prompts=0", "training.steps=40", "training.learning_rate=1e-4"
    train_and_kill(folder, changed, num_updates=6, resume=True)
    assert_verifies(folder)
    assert run(recipe(model, tmp_path, *changed[::2], "training.steps=12"), folder, resume=True)["steps"] == 12
    assert "recipes of 3 phases" in assert_verifies(folder)
    assert retrain(folder).difference is None


def test_a_reward_function_that_has_changed_is_said_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    run(recipe(model, tmp_path, "evaluation.prompts=0"), tmp_path / "run")
    heard, same = Heard(), Heard()
    longer = recipe(model, tmp_path, "evaluation.prompts=0", "training.steps=4")
    module = tmp_path / "our_rewards.py"
    module.write_text(module.read_text() + "# another line\n")
    run(longer, tmp_path / "run", resume=True, observer=heard)
    said = "the source of `our_rewards:letters` has changed since the run used it last"
    assert [text for text in heard.said if said in text]
    longer = recipe(model, tmp_path, "evaluation.prompts=0", "training.steps=5")
    run(longer, tmp_path / "run", resume=True, observer=same)
    assert not [text for text in same.said if said in text]
    assert_verifies(tmp_path / "run")
